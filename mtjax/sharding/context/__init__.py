"""Context parallelism: the tokens of each sample are sharded over ranks; attention across these ranks."""
