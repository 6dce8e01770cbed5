"""Attention between queries, keys and values: one file per implementation, and the choice between them."""
