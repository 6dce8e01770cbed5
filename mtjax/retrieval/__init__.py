"""Embeddings of chunks of text, and search for their neighbours: exact on devices, or with an index of faiss."""
