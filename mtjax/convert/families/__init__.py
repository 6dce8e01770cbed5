"""Hugging Face's families: one file each, with the table of its tensors and the meaning of its config.json."""
