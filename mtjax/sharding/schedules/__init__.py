"""Schedules: in which order ranks work through microbatches and parts of the model; one file each."""
