"""Starts a run's processes on this machine, and starts them again when they fail."""
