"""Samples of a task's rows: padded tokens of one or two texts, a label and its weight; shuffled epochs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.samples.sample import Dataset, Sample
from mtjax.data.tokens.fast_tokenizer import ROBERTA_NAMES
from mtjax.errors import UserError

Ids = tuple[np.ndarray, ...]
"""Token ids of one or two texts."""


@dataclass(frozen=True)
class RowFormat:
    """The layout of one or two texts in a row, for BERT or for a decoder.

    BERT: `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with token type 1 for B; RoBERTa has two separators between A and
    B, and its own names of the special tokens. Decoders: the tokens that the tokenizer
    prepends, A, and for two texts the end-of-document token and B.

    Attributes:
      is_bert: whether the layout is BERT's.
      pad: id of padding.
      cls: id of `[CLS]`; -1 for decoders.
      sep: id of `[SEP]`, or of the end-of-document token.
      between: number of separators between two texts.
    """

    is_bert: bool
    pad: int
    cls: int
    sep: int
    between: int = 1

    @classmethod
    def of(cls, tokenizer: Tokenizer, family: str) -> "RowFormat":
        """Returns the layout of a family.

        Raises:
          UserError: a BERT's tokenizer does not have its special tokens.
        """
        pad = tokenizer.special("[PAD]")
        # Padding is masked: any id serves where a vocabulary has none for it.
        pad = tokenizer.eod if pad is None else pad
        if family != "bert":
            return cls(False, pad, -1, tokenizer.eod)
        special = {name: tokenizer.special(name) for name in ("[CLS]", "[SEP]")}
        if None in special.values():
            raise UserError(
                f"BERT requires a tokenizer with {' and '.join(special)}: add --tokenizer with BERT's tokenizer"
            )
        start, sep = (int(i or 0) for i in special.values())
        return cls(True, pad, start, sep, between=2 if tokenizer.token(start) == ROBERTA_NAMES["[CLS]"] else 1)

    def length(self, ids: Ids) -> int:
        """Returns the number of tokens of a row without truncation."""
        return sum(map(len, ids)) + self._added(ids)

    def _added(self, ids: Ids) -> int:
        inside = self.between * (len(ids) - 1)
        return 2 + inside if self.is_bert else inside

    def row(self, ids: Ids, length: int) -> tuple[list[int], int]:
        """Returns a row's tokens, and how many of them belong to the first text.

        If there are more than `length`, truncates the longer text at its end, as transformers' `longest_first` does.
        """
        sizes = _truncated([len(text) for text in ids], length - self._added(ids))
        texts = [text[:size] for text, size in zip(ids, sizes, strict=True)]
        if not self.is_bert:
            first = len(texts[0]) + len(texts) - 1
            return [*texts[0], *(i for text in texts[1:] for i in (self.sep, *text))], first
        first = [self.cls, *texts[0], self.sep]
        begin = [self.sep] * (self.between - 1)
        return [*first, *(i for text in texts[1:] for i in (*begin, *text, self.sep))], len(first)


class RowEncoder:
    """Encodes texts for a family's rows.

    Raises:
      UserError: a BERT's tokenizer does not have its special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self.tokenizer, self.format = tokenizer, RowFormat.of(tokenizer, family)

    def encode(self, rows: Sequence[tuple[str, ...]]) -> list[Ids]:
        """Encodes each row's texts; a text that occurs in several rows is encoded once, to one array."""
        # Of decoders, only the first text gets the tokens that the tokenizer prepends.
        known = dict.fromkeys(text for row in rows for text in (row if self.format.is_bert else row[1:]))
        arrays = dict(zip(known, map(_array, self.tokenizer.encode_batch(list(known))), strict=True))
        if self.format.is_bert:
            return [tuple(arrays[text] for text in row) for row in rows]
        first = self.tokenizer.encode_prompt
        return [(_array(first(row[0])), *(arrays[text] for text in row[1:])) for row in rows]


def _array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


def _truncated(sizes: list[int], limit: int) -> list[int]:
    """Reduces sizes to a sum of at most `limit`: first the larger to the smaller, then both equally."""
    if sum(sizes) <= limit:
        return sizes
    if len(sizes) == 1:
        return [limit]
    small = min(*sizes, limit // 2)
    return [small, limit - small] if sizes[0] <= sizes[1] else [limit - small, small]


@dataclass(frozen=True)
class LazyRows(Sequence[tuple[list[int], int]]):
    """Rows that are assembled on access, so that texts in several rows are stored once."""

    ids: Sequence[Ids]
    format: RowFormat
    length: int

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> tuple[list[int], int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.format.row(self.ids[index], self.length)


@dataclass(frozen=True)
class Samples:
    """Rows with labels as a `Dataset`.

    Attributes:
      rows: tokens of each row, and how many belong to the first text.
      labels: int32 or float32 [rows]; for spans [rows, 2].
      weights: float32 [rows].
      length: sequence length.
      pad: id of padding.
      group: number of adjacent rows that stay together when shuffled: a question's choices.
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
        positions = np.arange(self.length)
        tokens = np.full(self.length, self.pad, np.int32)
        tokens[: len(ids)] = ids
        return {
            "tokens": tokens,
            # Padding has type 0, as transformers pads.
            "token_types": ((positions >= first) & (positions < len(ids))).astype(np.int32),
            "padding_mask": (positions < len(ids)).astype(np.int32),
            "label": self.labels[index],
            "weight": self.weights[index],
        }


class Grouped(Dataset, Protocol):
    """A dataset of groups of adjacent samples that stay together when shuffled."""

    @property
    def group(self) -> int:
        """Number of samples in a group; 1 if samples are independent."""
        ...


@dataclass(frozen=True)
class Epochs:
    """Epochs over samples, each shuffled differently; sample k of a run depends only on k and the seed."""

    samples: Grouped
    seed: int
    count: int
    """Number of samples of the run, including an incomplete last epoch."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        epoch, index_in_epoch = divmod(index, len(self.samples))
        group, row = divmod(index_in_epoch, self.samples.group)
        order = order_of_pass(self.seed, epoch, len(self.samples) // self.samples.group)
        return self.samples[int(order[group]) * self.samples.group + row]


# A batch may end one epoch and begin the next: few orders are in use at a time.
@lru_cache(maxsize=4)
def order_of_pass(seed: int, epoch: int, count: int) -> np.ndarray:
    """Returns the order of `count` groups of samples in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)
