"""What cleaning does to one document at a time: repair, measure, sign. Runs in worker processes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtjax.data.cleaning.minhash import PERMUTATIONS, WORD, MinHash, Shingles
from mtjax.data.cleaning.overlap import OVERLAP_WORDS, TestGrams, found_in, long_grams
from mtjax.data.cleaning.removal_list import FoundIds, RemovalList
from mtjax.data.corpus.documents import (
    DocumentChunk,
    Fault,
    check_characters,
    decode,
    json_object,
    parsed,
    strings_at,
    value_at,
    with_value,
)
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import require

EXCERPT = 80
# Unlike the decoder of `documents`, it does not read long integers as 0: they are copied to the output.
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class CleanOptions:
    """What is done to each document.

    Attributes:
      key: of the JSON objects' text.
      fix_unicode: repair mojibake and the like with ftfy.
      min_tokens: shorter documents are dropped.
      tokenizer: counts tokens; words are counted when None.
      shingle_words: length of the word n-grams by which documents are compared.
      id_key: of the JSON objects' ids.
      removal_list: ids of documents to drop.
    """

    key: str = "text"
    fix_unicode: bool = True
    min_tokens: int = 128
    tokenizer: Tokenizer | None = None
    shingle_words: int = 5
    id_key: str = "id"
    removal_list: RemovalList = field(default_factory=RemovalList)


@dataclass(frozen=True)
class Drop:
    """A dropped document.

    Attributes:
      line: where it is in its file.
      reason: in a few words.
      text: how it begins.
      more: further facts by name, which JSON can have.
    """

    line: int
    reason: str
    text: str
    more: Mapping[str, Any] = field(default_factory=dict)


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
      found: which ids of removal lists the documents have.
      not_finite: rows in which NaN or an infinite number became null.
    """

    rows: list[bytes]
    lines: np.ndarray
    signatures: np.ndarray
    drops: list[Drop]
    errors: list[tuple[int, str]]
    repaired: int
    found: FoundIds
    not_finite: int


class Cleaner:
    """Repairs, measures and signs the documents of a chunk."""

    def __init__(self, options: CleanOptions) -> None:
        self._options = options
        self._fix: Callable[[str], str] = require("ftfy", "data").fix_text if options.fix_unicode else str
        self._shingles = Shingles(options.shingle_words)
        self._minhash = MinHash()

    def __call__(self, chunk: DocumentChunk) -> CleanedChunk:
        """Cleans the documents of a chunk, in order."""
        options = self._options
        kept: list[tuple[int, dict[str, Any], str]] = []
        drops, errors, repaired = [], [], 0
        found = FoundIds()
        for line, document in parsed(chunk, lambda raw: parse(raw, chunk.is_json, options.key)):
            if isinstance(document, Fault):
                errors.append((line, document.message))
                continue
            row, original = document
            # Before the repair: an id decides, whatever the text.
            listed = options.removal_list.find(row, options.id_key, found)
            if listed is not None:
                drops.append(Drop(line, "on a removal list", original[:EXCERPT], listed))
                continue
            text = self._fix(original)
            try:
                # After the repair, which may join the halves of a surrogate pair.
                check_characters(text, options.key)
            except ValueError as e:
                errors.append((line, str(e)))
                continue
            repaired += text != original
            # Other keys stay as they are: a cleaned corpus keeps its metadata.
            kept.append((line, with_value(row, options.key, text), text))
        # All texts of a chunk at once: a tokenizer encodes a batch faster.
        counts = self._count([text for _, _, text in kept])
        long = [document for document, n in zip(kept, counts, strict=True) if n >= options.min_tokens]
        for (line, _, text), n in zip(kept, counts, strict=True):
            if n < options.min_tokens:
                drops.append(Drop(line, f"shorter than {options.min_tokens} tokens", text[:EXCERPT]))
        # Documents on removal lists come before short ones of earlier lines.
        drops.sort(key=lambda drop: drop.line)
        written = [_line(row) for _, row, _ in long]
        return CleanedChunk(
            rows=[line for line, _ in written],
            lines=np.array([line for line, _, _ in long], np.int64),
            signatures=self.sign([text for _, _, text in long]),
            drops=drops,
            errors=errors,
            repaired=repaired,
            found=found,
            not_finite=sum(not_finite for _, not_finite in written),
        )

    def _count(self, texts: Sequence[str]) -> list[int]:
        if self._options.tokenizer is None:
            return [len(WORD.findall(text)) for text in texts]
        return [len(ids) for ids in self._options.tokenizer.encode_batch(texts)]

    def sign(self, texts: Sequence[str]) -> np.ndarray:
        """Computes the MinHash signatures of texts: uint32[texts, PERMUTATIONS]."""
        signatures = np.empty((len(texts), PERMUTATIONS), np.uint32)
        for i, text in enumerate(texts):
            signatures[i] = self._minhash(self._shingles(text))
        return signatures


def parse(document: bytes, is_json: bool, key: str) -> tuple[dict[str, Any], str]:
    """Returns a raw document as a JSON object, and the text under `key`: the strings of a list are joined by line ends.

    Raises:
      ValueError: it isn't a JSON object, or has no text there.
    """
    text = decode(document)
    if not is_json:
        return {key: text}, text
    row = json_object(text, _DECODER)
    # A list becomes one string: cleaned documents are written with one.
    return row, "\n".join(strings_at(row, key))


def _line(row: dict[str, Any]) -> tuple[bytes, bool]:
    """Returns a document as a line of JSON, and whether NaN or an infinite number became null, as in pandas and jq."""
    is_finite = True
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        # JSON has neither, but Python reads and writes them: a line with them can't be read by other tools.
        is_finite = False
        text = json.dumps(json.loads(json.dumps(row), parse_constant=lambda _: None), ensure_ascii=False)
    try:
        return text.encode() + b"\n", not is_finite
    except UnicodeEncodeError:  # half of a surrogate pair under a key that nothing reads: it is JSON only as an escape
        return json.dumps(json.loads(text)).encode() + b"\n", not is_finite


class OverlapFinder:
    """Finds the 8-grams of test sets in a chunk of cleaned documents."""

    def __init__(self, tests: Sequence[TestGrams], key: str) -> None:
        self._tests, self._key = tests, key
        self._shingles = Shingles(OVERLAP_WORDS)

    def __call__(self, chunk: DocumentChunk) -> list[np.ndarray]:
        """Returns for each test set the indices of its n-grams that occur in the chunk."""
        texts = [value_at(json.loads(document), self._key)[0] for document in chunk.documents]
        hashes = [long_grams(self._shingles, text) for text in texts]
        together = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]))
        return [found_in(test, together) for test in self._tests]
