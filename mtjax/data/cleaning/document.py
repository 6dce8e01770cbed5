"""What cleaning does to one document at a time: repair, measure, sign. Runs in worker processes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtjax.data.cleaning.minhash import PERMUTATIONS, WORD, MinHash, Shingles
from mtjax.data.cleaning.overlap import OVERLAP_WORDS, TestGrams, found_in, long_grams
from mtjax.data.corpus.reader import Chunk, check_characters
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import require

EXCERPT = 80


@dataclass(frozen=True)
class CleanOptions:
    """What is done to each document.

    Attributes:
      key: of the JSON objects' text.
      fix_unicode: repair mojibake and the like with ftfy.
      min_tokens: shorter documents are dropped.
      tokenizer: counts tokens; words are counted when None.
      shingle_words: length of the word n-grams by which documents are compared.
      id_key: of the JSON objects' names.
      removed_ids: names of documents to drop.
    """

    key: str = "text"
    fix_unicode: bool = True
    min_tokens: int = 128
    tokenizer: Tokenizer | None = None
    shingle_words: int = 5
    id_key: str = "id"
    removed_ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Drop:
    """A dropped document.

    Attributes:
      line: where it is in its file.
      reason: in a few words.
      text: how it begins.
    """

    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class CleanedChunk:
    """A chunk after repair.

    Attributes:
      rows: the documents that may stay, as lines of JSON.
      lines: int64[rows], where each was in its file.
      signatures: uint32[rows, PERMUTATIONS].
      drops: the others.
      errors: (line, what is wrong) of those that can't be read.
      repaired: how many texts the repair changed.
    """

    rows: list[bytes]
    lines: np.ndarray
    signatures: np.ndarray
    drops: list[Drop]
    errors: list[tuple[int, str]]
    repaired: int


class Cleaner:
    """Repairs, measures and signs the documents of a chunk."""

    def __init__(self, options: CleanOptions) -> None:
        self._options = options
        self._fix: Callable[[str], str] = require("ftfy", "data").fix_text if options.fix_unicode else str
        self._shingles = Shingles(options.shingle_words)
        self._minhash = MinHash()

    def __call__(self, chunk: Chunk) -> CleanedChunk:
        """The documents of a chunk, in order."""
        options, line = self._options, chunk.first_line
        kept: list[tuple[int, dict[str, Any]]] = []
        drops, errors, repaired = [], [], 0
        for document in chunk.documents:
            here, line = line, line + document.count(b"\n")
            if not document.strip():
                continue
            try:
                row = parse(document, chunk.is_json, options.key)
            except (ValueError, RecursionError) as e:
                errors.append((here, str(e)))
                continue
            if str(row.get(options.id_key)) in options.removed_ids:
                drops.append(Drop(here, "on a removal list", row[options.key][:EXCERPT]))
                continue
            text = self._fix(row[options.key])
            try:
                check_characters(text, options.key)
            except ValueError as e:
                errors.append((here, str(e)))
                continue
            repaired += text != row[options.key]
            kept.append((here, {**row, options.key: text}))
        counts = self._count([row[options.key] for _, row in kept])
        long = [(here, row) for (here, row), n in zip(kept, counts, strict=True) if n >= options.min_tokens]
        for (here, row), n in zip(kept, counts, strict=True):
            if n < options.min_tokens:
                drops.append(Drop(here, f"shorter than {options.min_tokens} tokens", row[options.key][:EXCERPT]))
        drops.sort(key=lambda drop: drop.line)
        rows = [_line(row) for _, row in long]
        lines = np.array([here for here, _ in long], np.int64)
        return CleanedChunk(rows, lines, self.sign([row[options.key] for _, row in long]), drops, errors, repaired)

    def _count(self, texts: Sequence[str]) -> list[int]:
        if self._options.tokenizer is None:
            return [len(WORD.findall(text)) for text in texts]
        return [len(ids) for ids in self._options.tokenizer.encode_batch(texts)]

    def sign(self, texts: Sequence[str]) -> np.ndarray:
        """uint32[texts, PERMUTATIONS]."""
        signatures = np.empty((len(texts), PERMUTATIONS), np.uint32)
        for i, text in enumerate(texts):
            signatures[i] = self._minhash(self._shingles(text))
        return signatures


def parse(document: bytes, is_json: bool, key: str) -> dict[str, Any]:
    """A raw document as a JSON object with text under `key`; the strings of a list are joined by line ends.

    Raises:
      ValueError: it isn't one.
    """
    text = document.decode("utf-8-sig")
    row = json.loads(text) if is_json else {key: text}
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, list) and all(isinstance(piece, str) for piece in value):
        return {**row, key: "\n".join(value)}
    if not isinstance(value, str):
        raise ValueError(f"not a JSON object with text under the key {key!r}")
    return row


def _line(row: dict[str, Any]) -> bytes:
    """A document as a line of JSON."""
    try:
        return json.dumps(row, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair under a key that nobody reads: only escaped is it JSON
        return json.dumps(row).encode() + b"\n"


class OverlapFinder:
    """Finds the 8-grams of test sets in a chunk of cleaned documents."""

    def __init__(self, tests: Sequence[TestGrams], key: str) -> None:
        self._tests, self._key = tests, key
        self._shingles = Shingles(OVERLAP_WORDS)

    def __call__(self, chunk: Chunk) -> list[np.ndarray]:
        """For each test set, the positions of its n-grams that occur in the chunk."""
        texts = [json.loads(document)[self._key] for document in chunk.documents]
        hashes = [long_grams(self._shingles, text) for text in texts]
        together = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))
        return [found_in(test, together) for test in self._tests]
