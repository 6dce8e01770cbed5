"""Starts a run's processes on this machine, and restarts them after failures."""
