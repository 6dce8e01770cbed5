"""Lengths for which programs are compiled: few, so that few are compiled."""

from collections.abc import Sequence

CHUNKS = (16, 64, 128, 256)
"""Of a prompt's chunks."""


def doubled(length: int, least: int) -> int:
    """`length`, doubled until it is at least `least`."""
    while length < least:
        length *= 2
    return length


def chunk_length(lengths: Sequence[int], tokens: int) -> int:
    """The shortest of ascending `lengths` that takes so many tokens, else the longest."""
    return next((length for length in lengths if length >= tokens), lengths[-1])
