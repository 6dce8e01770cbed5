"""Corpora: text files read in a stream, and Megatron's indexed datasets read and written."""
