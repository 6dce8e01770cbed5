"""MinHash signatures of documents: equal-length rows of numbers, of which the share that agree estimates the Jaccard
similarity of the documents' word n-grams (Broder 1997).
"""

import hashlib
import re

import numpy as np

# With 128 numbers the estimate of a similarity of 0.7 has a standard deviation of 0.04: sqrt(0.7 x 0.3 / 128).
PERMUTATIONS = 128
WORD = re.compile(r"\w+")
# Times 128 numbers of 8 bytes: 4 MiB, which stay in a cache.
SHINGLES_AT_A_TIME = 1 << 12
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
SHIFT = np.uint64(32)


class Shingles:
    """Turns text into hashes of its word n-grams, remembering the hashes of words."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> np.ndarray:
        """Hashes each n words in a row, lower-cased, repetitions too; all words if fewer: uint64[count].

        Empty for a text without words.
        """
        # Computed from the words' hashes, which are remembered, not from the text of each n-gram.
        words = np.array([self._hash(word) for word in WORD.findall(text.lower())], np.uint64)
        if len(words) == 0:
            return words
        n = min(self.n, len(words))
        hashes = np.zeros(len(words) - n + 1, np.uint64)
        with np.errstate(over="ignore"):
            for i in range(n):
                # Mixed after each word: a plain sum would be the same for words in another order.
                hashes = mix(hashes + words[i : len(words) - n + 1 + i])
        return hashes

    def _hash(self, word: str) -> int:
        value = self._known.get(word)
        if value is None:
            # A web corpus has new words without end (numbers, URLs); the memory for them is bounded.
            if len(self._known) > 1_000_000:
                self._known.clear()
            # Not Python's hash, which differs between processes: signatures of all workers are compared.
            value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
            self._known[word] = value
        return value


def mix(values: np.ndarray) -> np.ndarray:
    """Spreads uint64 values so that every bit depends on all others (the finalizer of SplitMix64)."""
    values = (values + MIX) & np.uint64(0xFFFFFFFFFFFFFFFF)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class MinHash:
    """Makes signatures of `PERMUTATIONS` numbers; the same on every machine."""

    def __init__(self) -> None:
        # RandomState's stream is frozen: the same signatures with any version of numpy.
        random = np.random.RandomState(1)
        drawn = random.randint(0, 2**32, (2, 2, PERMUTATIONS)).astype(np.uint64)
        # Odd, so that a product modulo 2^64 maps different shingles to different values; the upper half is taken, as
        # the lower bits of such a product are poorly mixed (multiply-shift hashing, Dietzfelbinger et al. 1997).
        self._factor = ((drawn[0, 0] << SHIFT) | drawn[0, 1]) | np.uint64(1)
        self._offset = (drawn[1, 0] << SHIFT) | drawn[1, 1]

    def __call__(self, shingles: np.ndarray) -> np.ndarray:
        """Returns for each hash function the least value over uint64[n] shingles, n > 0: uint32[PERMUTATIONS]."""
        least = np.full(PERMUTATIONS, np.iinfo(np.uint32).max, np.uint32)
        # Jaccard similarity is of sets: repetitions don't count.
        shingles = np.unique(shingles)
        with np.errstate(over="ignore"):
            for at in range(0, len(shingles), SHINGLES_AT_A_TIME):
                part = shingles[at : at + SHINGLES_AT_A_TIME, None] * self._factor + self._offset
                np.minimum(least, (part >> SHIFT).astype(np.uint32).min(axis=0), out=least)
        return least
