"""Samples of each model family from indexed datasets: what is in them, and their order."""
