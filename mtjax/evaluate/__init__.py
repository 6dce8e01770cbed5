"""Zero-shot evaluation: how likely a model finds given text, and whether it would have written the same."""
