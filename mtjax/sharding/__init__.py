"""The only place that knows mesh axes: meshes, logical names, layouts, and what `shard_map` must say explicitly."""
