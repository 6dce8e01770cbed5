"""Schedules: the order in which ranks work through microbatches and pipeline chunks; one file each."""
