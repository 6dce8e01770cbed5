"""Families of models: each file has what a family does beside its layers."""
