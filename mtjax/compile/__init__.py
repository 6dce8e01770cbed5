"""Compiles a run's programs before it, so that it starts with them."""
