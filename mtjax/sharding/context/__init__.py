"""Context parallelism: ranks that share the tokens of a sample, and attention across them."""
