"""What a model is asked: rows of tokens, of which the last ones count."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Row:
    """Tokens that a model reads at once; each is predicted from those before it.

    Attributes:
      tokens: ids, [at least 2].
      first: place in `tokens` of the first that counts; all after it count too. At least 1, for nothing predicts the
        first token.
    """

    tokens: np.ndarray
    first: int

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class Scores:
    """What a model says of rows, in their order."""

    log_probability: np.ndarray
    """[rows], float64: of the counted tokens together, in nats."""
    all_best: np.ndarray
    """[rows], bool: whether each counted token is the most likely one."""

    def __getitem__(self, rows: slice) -> "Scores":
        """Those of some rows."""
        return Scores(self.log_probability[rows], self.all_best[rows])


class Window(NamedTuple):
    """Tokens that are read at once, and where those that count begin."""

    start: int
    stop: int
    first: int

    @property
    def counted(self) -> int:
        """Tokens that count; 0 where an earlier window has counted the last."""
        return max(self.stop - self.first, 0)


def windows(tokens: int, length: int, overlap: int) -> Iterator[Window]:
    """The windows of a text as Megatron's zero-shot evaluation cuts them: every token but the first counts once.

    A window predicts `length` tokens, and the next one starts `overlap` tokens later and counts its last `overlap`, so
    that each of these is predicted from at least `length - overlap` others. Megatron goes on until the start of a
    window, not its end, has passed the text: the last windows count nothing, and are given here as well.

    Args:
      tokens: of the text.
      length: most tokens that the model can read.
      overlap: from 1 to `length`; `length` gives windows side by side.
    """
    targets = tokens - 1
    more = -(-max(targets - overlap, 0) // overlap)
    for start in range(0, (more + 1) * overlap, overlap):
        first = start + 1 if start == 0 else start + 1 + length - overlap
        yield Window(start, min(start + length + 1, tokens), first)


def rows_of_text(ids: np.ndarray, length: int, overlap: int, given: int = 1) -> list[Row]:
    """Cuts a text into the windows that count something.

    Args:
      ids: int32[tokens].
      length: most tokens that the model can read.
      overlap: tokens that each window but the first counts, as `windows` has it.
      given: tokens at the beginning that are read and not predicted; at least 1.
    """
    found = (w._replace(first=max(w.first, given)) for w in windows(len(ids), length, overlap))
    return [Row(ids[w.start : w.stop], w.first - w.start) for w in found if w.counted]


def scores_of(answers: Mapping[int, tuple[float, bool]]) -> Scores:
    """The scores of all rows, from the answer to each by its number."""
    in_order = [answers[number] for number in range(len(answers))]
    return Scores(np.array([a[0] for a in in_order]), np.array([a[1] for a in in_order], bool))
