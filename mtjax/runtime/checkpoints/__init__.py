"""Checkpoints: written and read on any mesh, on one shared disk, on each machine's own, or in an object store."""
