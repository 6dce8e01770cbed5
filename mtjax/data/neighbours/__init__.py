"""Neighbours of chunks (Retro, arXiv 2112.04426): a database of chunks, search in it, and the file that a run reads."""
