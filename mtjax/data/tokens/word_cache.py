"""Byte-level BPE with a cache of words: a corpus has few different words, and each needs its merges only once.

GPT-2's pre-tokenizer cuts text into words that are encoded without looking at their neighbours, so the ids of a text
are the ids of its words. Gives what the `tokenizers` library gives, in less than half the time.
"""

import json
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from tokenizers import Tokenizer as HuggingFace

# GPT-2's, as in its encoder.py and in the tokenizers library.
PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# Characters that Unicode has called letter, number or space - or neither - for so long that all libraries agree.
SETTLED = re.compile(
    r"[\x00-\u0527\u1e00-\u1eff\u2000-\u2070\u20a0-\u20bf\u2100-\u214f\u2190-\u2bd1\u3000-\u312d\u3131-\u318e"
    r"\u3400-\u4db5\u4e00-\u9fd5\uac00-\ud7a3\uff00-\uffef\U0001f300-\U0001f9ff]*"
)
MOST_WORDS = 1_000_000
MOST_TOKENS = 8_000_000


def can_cache(tokenizer: HuggingFace) -> bool:
    """Returns whether ids of a text are those of its words: GPT-2's kind of tokenizer, without added tokens."""
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    model, before = parts["model"], parts["pre_tokenizer"] or {}
    return (
        parts["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and before.get("use_regex") is True
        and not before.get("add_prefix_space")
        and model["type"] == "BPE"
        and not (model.get("dropout") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        # Tokens that are not special are found in the text before it is cut into words.
        and all(added["special"] for added in parts["added_tokens"])
    )


def word_cache(tokenizer: HuggingFace) -> "WordCache | None":
    """Builds a cache for a tokenizer that allows one; None otherwise, or without the library `regex` (extra `data`)."""
    if find_spec("regex") is None or not can_cache(tokenizer):
        return None
    return WordCache(tokenizer)


class WordCache:
    """Encodes texts word by word, remembering words. One per process."""

    def __init__(self, tokenizer: HuggingFace) -> None:
        """Wraps a tokenizer for which `can_cache` holds."""
        self._tokenizer = tokenizer
        self._words = import_module("regex").compile(PATTERN).findall
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids = np.empty(0, np.int64)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes each text; texts with rare characters go through the library."""
        # `regex` and the library's Rust code have tables of Unicode of different years.
        settled = [SETTLED.fullmatch(text) is not None for text in texts]
        words = [self._words(text) if fast else [] for text, fast in zip(texts, settled, strict=True)]
        self._learn(set().union(*words))
        others = iter(self._library([text for text, fast in zip(texts, settled, strict=True) if not fast]))
        return [self._join(known) if fast else next(others) for known, fast in zip(words, settled, strict=True)]

    def _library(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def _learn(self, words: set[str]) -> None:
        if len(self._numbers) > MOST_WORDS or len(self._ids) > MOST_TOKENS:
            self._forget()
        new = list(words - self._numbers.keys())
        if not new:
            return
        encoded = self._library(new)
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        starts = len(self._ids) + np.cumsum(lengths) - lengths
        self._numbers.update(zip(new, range(len(self._numbers), len(self._numbers) + len(new)), strict=True))
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, *(np.array(ids, np.int64) for ids in encoded)])

    def _join(self, words: list[str]) -> list[int]:
        numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
        lengths = self._lengths[numbers]
        # The ids of all words by one indexing operation, not by a loop over words.
        before = np.cumsum(lengths) - lengths
        at = np.repeat(self._starts[numbers] - before, lengths)
        return self._ids[at + np.arange(len(at))].tolist()
