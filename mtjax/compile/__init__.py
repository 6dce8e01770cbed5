"""Compiles a run's programs ahead of time, into the compile cache."""
