"""Hugging Face's model families: one file each, with the table of its tensors and the mapping of its config.json."""
