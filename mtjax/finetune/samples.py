"""Rows as samples: tokens of one text or two, padded, with a label and its weight; and passes over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.samples.sample import Dataset, Sample
from mtjax.errors import UserError

Ids = tuple[np.ndarray, ...]
"""Of one text or two."""


@dataclass(frozen=True)
class RowFormat:
    """How the tokens of one text or two stand in a row, as BERT or as a decoder reads them.

    BERT: `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, B of token type 1. Decoders: what their tokenizer puts before a
    text, A, and with B the end-of-document token between the two.

    Attributes:
      is_bert: which of the two.
      pad: id of padding.
      cls: of `[CLS]`; a decoder has none.
      sep: of what ends a text.
    """

    is_bert: bool
    pad: int
    cls: int
    sep: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, family: str) -> "RowFormat":
        """That of a family.

        Raises:
          UserError: a BERT's tokenizer lacks its special tokens.
        """
        pad = tokenizer.special("[PAD]")
        pad = tokenizer.eod if pad is None else pad
        if family != "bert":
            return cls(False, pad, -1, tokenizer.eod)
        special = {name: tokenizer.special(name) for name in ("[CLS]", "[SEP]")}
        if None in special.values():
            raise UserError(f"BERT's rows need {' and '.join(special)}, and the tokenizer lacks one: name BERT's")
        return cls(True, pad, *(int(i or 0) for i in special.values()))

    def length(self, ids: Ids) -> int:
        """Tokens of a row that is not truncated."""
        return sum(map(len, ids)) + self._added(ids)

    def _added(self, ids: Ids) -> int:
        return 1 + len(ids) if self.is_bert else len(ids) - 1

    def row(self, ids: Ids, length: int) -> tuple[list[int], int]:
        """A row's tokens, and how many of them belong to the first text.

        Where they are more than `length`, the longer text is cut at its end, as transformers' `longest_first` does.
        """
        sizes = _cut([len(text) for text in ids], length - self._added(ids))
        texts = [text[:size] for text, size in zip(ids, sizes, strict=True)]
        if not self.is_bert:
            first = len(texts[0]) + len(texts) - 1
            return [*texts[0], *(i for text in texts[1:] for i in (self.sep, *text))], first
        first = [self.cls, *texts[0], self.sep]
        return [*first, *(i for text in texts[1:] for i in (*text, self.sep))], len(first)


class Encoder:
    """Makes tokens of texts for a family's rows.

    Raises:
      UserError: a BERT's tokenizer lacks its special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self.tokenizer, self.format = tokenizer, RowFormat.of(tokenizer, family)

    def ids(self, rows: Sequence[tuple[str, ...]]) -> list[Ids]:
        """Of each row's texts; a text that several rows have is one array."""
        known = dict.fromkeys(text for row in rows for text in (row if self.format.is_bert else row[1:]))
        arrays = dict(zip(known, map(_array, self.tokenizer.encode_batch(list(known))), strict=True))
        if self.format.is_bert:
            return [tuple(arrays[text] for text in row) for row in rows]
        first = self.tokenizer.encode_prompt
        return [(_array(first(row[0])), *(arrays[text] for text in row[1:])) for row in rows]


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def _cut(sizes: list[int], room: int) -> list[int]:
    """Sizes of at most `room` together: the longer is cut down to the shorter, and then both alike."""
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return [room]
    small = min(*sizes, room // 2)
    return [small, room - small] if sizes[0] <= sizes[1] else [room - small, small]


@dataclass(frozen=True)
class Joined(Sequence[tuple[list[int], int]]):
    """Rows that are put together when they are read: their texts may be shared, and are kept once."""

    ids: Sequence[Ids]
    format: RowFormat
    length: int

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[list[int], int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.format.row(self.ids[index], self.length)


@dataclass(frozen=True)
class Samples:
    """Rows, as a `Dataset`.

    Attributes:
      rows: tokens of each, and how many are of the first text.
      labels: int32 or float32, [rows], or of spans [rows, 2].
      weights: float32, [rows].
      length: of the arrays.
      pad: id of padding.
      group: rows side by side that stay together: a question's choices.
    """

    rows: Sequence[tuple[list[int], int]]
    labels: np.ndarray
    weights: np.ndarray
    length: int
    pad: int
    group: int = 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        ids, first = self.rows[index]
        place = np.arange(self.length)
        tokens = np.full(self.length, self.pad, np.int32)
        tokens[: len(ids)] = ids
        return {
            "tokens": tokens,
            "token_types": ((place >= first) & (place < len(ids))).astype(np.int32),
            "padding_mask": (place < len(ids)).astype(np.int32),
            "label": self.labels[index],
            "weight": self.weights[index],
        }


class Grouped(Dataset, Protocol):
    """Samples of which some stay together."""

    @property
    def group(self) -> int:
        """Samples side by side that do; 1 where each stands alone."""
        ...


@dataclass(frozen=True)
class Epochs:
    """Passes over samples, each in an order of its own: sample k of a run is a function of k and the seed alone."""

    samples: Grouped
    seed: int
    count: int
    """Samples of the run; the last batch reaches into a pass that is not completed."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        epoch, place = divmod(index, len(self.samples))
        group, row = divmod(place, self.samples.group)
        order = order_of_pass(self.seed, epoch, len(self.samples) // self.samples.group)
        return self.samples[int(order[group]) * self.samples.group + row]


@lru_cache(maxsize=4)
def order_of_pass(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` samples, or groups of them, in a pass."""
    return np.random.default_rng([seed, epoch]).permutation(count)
