"""The mesh, which of its axes shards what, a run's plan, pipeline stages and timetables: plain data, without jax."""
