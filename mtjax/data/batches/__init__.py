"""Batches: how many samples a step takes, and reading them ahead of time."""
