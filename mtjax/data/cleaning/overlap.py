"""How much of a test set occurs in a corpus: the share of its word 8-grams (section 4.1 of arXiv 1909.08053)."""

from dataclasses import dataclass

import numpy as np

from mtjax.data.cleaning.minhash import WORD, Shingles

OVERLAP_WORDS = 8


@dataclass(frozen=True)
class TestGrams:
    """The n-grams of a test set.

    Attributes:
      name: of the test set.
      unique: uint64[u], ascending hashes.
      counts: int64[u], how often each occurs in the test set.
    """

    __test__ = False  # pytest: not a test case

    name: str
    unique: np.ndarray
    counts: np.ndarray


def grams_of(name: str, texts: list[str]) -> TestGrams:
    """Returns the word 8-grams of a test set; texts with fewer words have none."""
    shingles = Shingles(OVERLAP_WORDS)
    parts = [hashes for text in texts if len(hashes := long_grams(shingles, text))]
    # An empty array in front: concatenate needs one.
    unique, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *parts]), return_counts=True)
    return TestGrams(name, unique, counts)


def long_grams(shingles: Shingles, text: str) -> np.ndarray:
    """Returns hashes of the full n-grams in `text`."""
    hashes = shingles(text)
    # A text of fewer than n words has one hash, of what there is, which is not an n-gram.
    return hashes if len(hashes) > 1 or len(WORD.findall(text)) >= shingles.n else hashes[:0]


def found_in(grams: TestGrams, hashes: np.ndarray) -> np.ndarray:
    """Returns the indices in `grams.unique` of those that are among a document's hashes."""
    if len(grams.unique) == 0 or len(hashes) == 0:
        return np.empty(0, np.int64)
    # The minimum keeps the index of hashes above all of the test set's in range; the comparison drops them.
    at = np.minimum(np.searchsorted(grams.unique, hashes), len(grams.unique) - 1)
    return np.unique(at[grams.unique[at] == hashes])


def share(grams: TestGrams, found: np.ndarray) -> float:
    """Returns the share of the test set's 8-grams, repetitions counted, that were found: `found` is bool[u]."""
    total = int(grams.counts.sum())
    return float(grams.counts[found].sum() / total) if total else 0.0
