"""Families of models: each file has what a family does besides its layers."""
