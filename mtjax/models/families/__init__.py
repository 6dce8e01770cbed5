"""Families of models, a file each: embedding, sections of layers, head and losses."""
