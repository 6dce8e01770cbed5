"""Rows of tokens to score, and their scores."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class ScoredRow:
    """A sequence of tokens of which the last ones are scored.

    Attributes:
      tokens: ids, at least 2.
      first: index in `tokens` of the first that is scored, with all after it; at least 1, as the first token has no
        prediction.
    """

    tokens: np.ndarray
    first: int

    @property
    def counted(self) -> int:
        """Number of scored tokens."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class RowScores:
    """A model's scores of rows, in their order."""

    log_probability: np.ndarray
    """[rows], float64: log-probability of all scored tokens, in nats."""
    all_best: np.ndarray
    """[rows], bool: whether every scored token is the most likely one."""

    def __getitem__(self, rows: slice) -> "RowScores":
        """Returns the scores of some rows."""
        return RowScores(self.log_probability[rows], self.all_best[rows])


class TextWindow(NamedTuple):
    """A window of a text, from `start` to `stop`, and the first token that it scores."""

    start: int
    stop: int
    first: int

    @property
    def counted(self) -> int:
        """Number of scored tokens; 0 if an earlier window has scored the last token."""
        return max(self.stop - self.first, 0)


def windows(tokens: int, length: int, overlap: int) -> Iterator[TextWindow]:
    """Yields the windows of a text as in Megatron's zero-shot evaluation: every token but the first is scored once.

    A window predicts `length` tokens. The next one starts `overlap` tokens later and scores its last `overlap` tokens,
    each of which is thus predicted from at least `length - overlap` tokens.

    Args:
      tokens: number of tokens of the text.
      length: most tokens that a window predicts.
      overlap: from 1 to `length`; with `length`, windows are adjacent.
    """
    targets = tokens - 1
    # Megatron continues until the start of a window, not its end, is past the text: the last ones score nothing.
    more = -(-max(targets - overlap, 0) // overlap)
    for start in range(0, (more + 1) * overlap, overlap):
        # The first window has no predecessor that scored its beginning.
        first = start + 1 if start == 0 else start + 1 + length - overlap
        yield TextWindow(start, min(start + length + 1, tokens), first)


def rows_of_text(ids: np.ndarray, length: int, overlap: int, given: int = 1) -> list[ScoredRow]:
    """Returns the windows of a text that score tokens.

    Args:
      ids: int32 [tokens].
      length: most tokens that a window predicts.
      overlap: tokens that each window but the first scores, as in `windows`.
      given: number of tokens at the beginning that are not scored; at least 1.
    """
    found = (w._replace(first=max(w.first, given)) for w in windows(len(ids), length, overlap))
    return [ScoredRow(ids[w.start : w.stop], w.first - w.start) for w in found if w.counted]


def digest_of_rows(rows: Sequence[ScoredRow]) -> str:
    """Returns a digest of the tokens of rows, and of which are scored."""
    hashed = hashlib.blake2b(digest_size=16)
    for row in rows:
        tokens = np.asarray(row.tokens, np.int64)
        hashed.update(np.array([len(tokens), row.first], np.int64).tobytes() + tokens.tobytes())
    return hashed.hexdigest()


def scores_of(answers: Mapping[int, tuple[float, bool]]) -> RowScores:
    """Returns the scores of all rows from the answer to each by its number."""
    # Answers come in the order of batches, which are grouped by length.
    in_order = [answers[number] for number in range(len(answers))]
    return RowScores(np.array([a[0] for a in in_order]), np.array([a[1] for a in in_order], bool))
