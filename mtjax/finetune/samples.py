"""Rows as samples: tokens of one text or two, padded, with a label and its weight; and passes over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.samples.sample import Sample
from mtjax.errors import UserError
from mtjax.finetune.rows import Example

Ids = tuple[list[int], ...]
"""Of one text or two."""


class Encoder:
    """Puts the tokens of one text or two into a row, as BERT or as a decoder reads them.

    BERT: `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, B of token type 1. Decoders: what their tokenizer puts before a
    text, A, and with B the end-of-document token between the two.

    Raises:
      UserError: a BERT's tokenizer lacks its special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self.tokenizer, self.is_bert = tokenizer, family == "bert"
        pad = tokenizer.special("[PAD]")
        self.pad = tokenizer.eod if pad is None else pad
        self._cls, self._sep = -1, tokenizer.eod
        if self.is_bert:
            special = {name: tokenizer.special(name) for name in ("[CLS]", "[SEP]")}
            if None in special.values():
                raise UserError(f"BERT's rows need {' and '.join(special)}, and the tokenizer lacks one: name BERT's")
            self._cls, self._sep = (int(i or 0) for i in special.values())

    def ids(self, rows: Sequence[Example]) -> list[Ids]:
        """Of each row's texts."""
        if not self.is_bert:
            encode = self.tokenizer.encode
            return [(self.tokenizer.encode_prompt(r.texts[0]), *map(encode, r.texts[1:])) for r in rows]
        flat = iter(self.tokenizer.encode_batch([text for row in rows for text in row.texts]))
        return [tuple(next(flat) for _ in row.texts) for row in rows]

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
            return [*texts[0], *(i for text in texts[1:] for i in (self._sep, *text))], first
        first = [self._cls, *texts[0], self._sep]
        return [*first, *(i for text in texts[1:] for i in (*text, self._sep))], len(first)


def _cut(sizes: list[int], room: int) -> list[int]:
    """Sizes of at most `room` together: the longer is cut down to the shorter, and then both alike."""
    if sum(sizes) <= room:
        return sizes
    if len(sizes) == 1:
        return [room]
    small = min(*sizes, room // 2)
    return [small, room - small] if sizes[0] <= sizes[1] else [room - small, small]


@dataclass(frozen=True)
class Samples:
    """Rows, as a `Dataset`.

    Attributes:
      rows: tokens of each, and how many are of the first text.
      labels: int32 or float32, [rows].
      weights: float32, [rows].
      length: of the arrays.
      pad: id of padding.
    """

    rows: list[tuple[list[int], int]]
    labels: np.ndarray
    weights: np.ndarray
    length: int
    pad: int

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


@dataclass(frozen=True)
class Epochs:
    """Passes over samples, each in an order of its own: sample k of a run is a function of k and the seed alone."""

    samples: Samples
    seed: int
    count: int
    """Samples of the run; the last batch reaches into a pass that is not completed."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        epoch, place = divmod(index, len(self.samples))
        return self.samples[int(order_of_pass(self.seed, epoch, len(self.samples))[place])]


@lru_cache(maxsize=4)
def order_of_pass(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` samples in a pass."""
    return np.random.default_rng([seed, epoch]).permutation(count)
