"""Cleaning a corpus: unicode repair, short documents, near-duplicates, overlap with test sets."""
