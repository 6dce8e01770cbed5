"""Tokens in a row that two pieces of text have in common."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def shared_runs(text: np.ndarray, other: np.ndarray, length: int) -> np.ndarray:
    """Returns for each run of `length` tokens of `text` whether `other` has it: bool[len(text) - length + 1]."""
    if min(len(text), len(other)) < length:
        return np.zeros(max(len(text) - length + 1, 0), bool)
    runs, known = (np.ascontiguousarray(sliding_window_view(each, length)) for each in (text, other))
    # A run as one opaque value, so that isin compares runs and not tokens.
    kind = np.dtype((np.void, runs.dtype.itemsize * length))
    return np.isin(runs.view(kind)[:, 0], known.astype(runs.dtype).view(kind)[:, 0])


def shares_run(text: np.ndarray, other: np.ndarray, length: int) -> bool:
    """Returns whether two texts have `length` tokens in a row in common."""
    return bool(shared_runs(text, other, length).any())
