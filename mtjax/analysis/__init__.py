"""Formulas of a run's parameters, FLOPs, memory, communication and time; imports no jax, of mtjax only the config."""
