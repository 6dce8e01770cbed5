"""Schedules: the order in which ranks work through microbatches and parts of the model; one file each."""
