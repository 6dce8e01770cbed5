"""Static lengths (buckets) to which sequences are padded, so that few programs are compiled."""

from collections.abc import Sequence

CHUNKS = (16, 64, 128, 256)
"""Lengths of prompt chunks."""


def doubled(length: int, least: int) -> int:
    """Returns `length` times the smallest power of two for which it is at least `least`."""
    while length < least:
        length *= 2
    return length


def chunk_length(lengths: Sequence[int], tokens: int) -> int:
    """Returns the shortest of ascending `lengths` that fits so many tokens, or the longest if none does."""
    # The longest is also the step in which a long prompt is divided: the prefix cache relies on that.
    return next((length for length in lengths if length >= tokens), lengths[-1])
