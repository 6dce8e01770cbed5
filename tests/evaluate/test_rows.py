"""The windows of a text, beside masks as Megatron's dataset makes them."""

import math

import numpy as np
import pytest

from mtjax.evaluate.rows import rows_of_text, windows


def megatron(tokens: int, length: int, overlap: int) -> list[np.ndarray]:
    """Numbers of the tokens that each window counts: what `_LMDataset` of Megatron's tasks/zeroshot_gpt does."""
    total = max(math.ceil(max(tokens - 1 - overlap, 0) / overlap) + 1, 1)
    counted = []
    for index in range(total):
        start = index * overlap
        read = np.arange(start, tokens)[: length + 1]
        mask = np.zeros(length + 1, int)
        mask[: len(read)] = 1
        mask = mask[1:]
        if overlap != length and index:
            mask[:-overlap] = 0
        counted.append(start + 1 + np.flatnonzero(mask))
    return counted


@pytest.mark.parametrize(
    ("tokens", "length", "overlap"),
    [
        (5001, 1024, 32),
        (5001, 1024, 1024),
        (100, 32, 7),
        (33, 32, 32),
        (34, 32, 32),
        (20, 32, 4),
        (2, 8, 8),
        (99, 32, 1),
    ],
)
def test_windows_are_megatrons(tokens: int, length: int, overlap: int) -> None:
    found, expected = list(windows(tokens, length, overlap)), megatron(tokens, length, overlap)
    assert [list(range(w.first, w.stop)) for w in found] == [counted.tolist() for counted in expected]
    assert all(w.stop - w.start <= length + 1 for w in found)
    assert sorted(i for w in found for i in range(w.first, w.stop)) == list(range(1, tokens))


def test_its_quirk() -> None:
    """5,000 targets: 126 windows of 1,024 that advance by 32 cover them, and 31 more count nothing."""
    found = list(windows(5001, 1024, 32))
    assert len(found) == 157
    assert sum(1 for w in found if w.counted) == 126
    assert len(rows_of_text(np.arange(5001), 1024, 32)) == 126


def test_rows_hold_what_windows_say() -> None:
    ids = np.arange(50)
    rows = rows_of_text(ids, 16, 5)
    assert np.concatenate([row.tokens[row.first :] for row in rows]).tolist() == list(range(1, 50))
    assert all(row.first >= 11 for row in rows[1:])
