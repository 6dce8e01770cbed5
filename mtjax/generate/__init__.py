"""Text from a model: prompts in, tokens out, many sequences at a time."""
