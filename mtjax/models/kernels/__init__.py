"""Attention between queries, keys and values: one file per implementation."""
