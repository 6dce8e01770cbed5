"""Near-duplicates in a corpus, by locality-sensitive hashing of MinHash signatures.

A signature is cut into bands; documents that agree in an entire band are compared. Bands are sorted one at a time, so
memory is some bytes per document, and the signatures stay on disk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mtjax.data.cleaning.minhash import PERMUTATIONS, mix

# With 25 bands of 5 rows a pair of similarity 0.7 is compared with a probability of 0.99, one of 0.8 with 0.9999. Fewer
# rows would find more pairs, and compare more for nothing.
ROWS = 5
BANDS = PERMUTATIONS // ROWS
DOCUMENTS_AT_A_TIME = 1 << 16
PAIRS_AT_A_TIME = 1 << 15
# Documents of a bucket are compared with this many of its first ones, which bounds the work that a text with many
# copies causes.
COMPARED_WITH = 32


@dataclass(frozen=True)
class Duplicate:
    """A document to drop.

    Attributes:
      document: its number.
      original: number of the document that is kept in its stead.
      similarity: estimated Jaccard similarity of the two.
    """

    document: int
    original: int
    similarity: float


def find_duplicates(
    signatures: np.ndarray, threshold: float, protected: int = 0, progress: Callable[[int], None] = lambda _: None
) -> list[Duplicate]:
    """Finds documents that are more similar than `threshold` to an earlier one that is retained.

    Args:
      signatures: uint32[documents, PERMUTATIONS], may be memory-mapped.
      threshold: Jaccard similarity above which the later document is dropped.
      protected: this many documents at the beginning are never dropped.
      progress: called with the number of bands done.
    """
    pairs, similarity = np.empty((0, 2), np.int64), np.empty(0)
    for band in range(BANDS):
        candidates = _candidates(_band_hashes(signatures, band))
        # Pairs that an earlier band has found similar are not compared again; those that were not similar are, which
        # costs less than to remember them.
        new = candidates[~np.isin(_keys(candidates), _keys(pairs))]
        similar, values = _similar_pairs(signatures, new, threshold)
        pairs, similarity = np.concatenate([pairs, similar]), np.concatenate([similarity, values])
        progress(band + 1)
    return _resolve(pairs, similarity, protected)


def _keys(pairs: np.ndarray) -> np.ndarray:
    """Returns a number for each pair of documents, of which there are fewer than 2^32."""
    return pairs[:, 0] << 32 | pairs[:, 1]


def _band_hashes(signatures: np.ndarray, band: int) -> np.ndarray:
    """Hashes one band of each signature: uint64[documents]."""
    hashes = np.zeros(len(signatures), np.uint64)
    with np.errstate(over="ignore"):
        for at in range(0, len(signatures), DOCUMENTS_AT_A_TIME):
            rows = np.asarray(signatures[at : at + DOCUMENTS_AT_A_TIME, band * ROWS : (band + 1) * ROWS])
            for row in rows.T:
                part = hashes[at : at + DOCUMENTS_AT_A_TIME]
                part[:] = mix(part + row)
    return hashes


def _candidates(hashes: np.ndarray) -> np.ndarray:
    """Returns int64[pairs, 2]: (earlier, later) documents in one bucket, the earlier among the bucket's first."""
    # Stable: within a bucket, documents stay in the order of the corpus, so that the earlier of a pair is the one that
    # is kept.
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]]) if len(ordered) else np.empty(0, bool)
    start = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0)) if len(order) else order
    rank = np.arange(len(order)) - start  # of a document within its bucket
    pairs = []
    for k in range(COMPARED_WITH):
        later = np.flatnonzero(rank > k)
        if len(later) == 0:
            break
        pairs.append(np.stack([order[start[later] + k], order[later]], axis=1))
    return np.concatenate(pairs) if pairs else np.empty((0, 2), np.int64)


def _similar_pairs(signatures: np.ndarray, pairs: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    similar, values = [np.empty((0, 2), np.int64)], [np.empty(0)]
    for at in range(0, len(pairs), PAIRS_AT_A_TIME):
        part = pairs[at : at + PAIRS_AT_A_TIME]
        similarity = (signatures[part[:, 0]] == signatures[part[:, 1]]).mean(axis=1)
        above = similarity > threshold
        similar.append(part[above])
        values.append(similarity[above])
    return np.concatenate(similar), np.concatenate(values)


def _resolve(pairs: np.ndarray, similarity: np.ndarray, protected: int) -> list[Duplicate]:
    """Drops, in order of the corpus, documents similar to a retained one; dropped ones are not compared with."""
    # Sorted by the later document: when it is decided on, all earlier ones have been.
    order = np.lexsort((pairs[:, 0], pairs[:, 1]))
    dropped: dict[int, Duplicate] = {}
    for (original, document), value in zip(pairs[order].tolist(), similarity[order].tolist(), strict=True):
        if document >= protected and document not in dropped and original not in dropped:
            dropped[document] = Duplicate(document, original, round(value, 4))
    return list(dropped.values())
