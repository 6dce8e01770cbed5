"""Which tokens a masked language model must guess: n-grams of whole words."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from mtjax.data.tokens.tokenizer import Tokenizer

Span = tuple[int, int]
DrawLength = Callable[[np.random.RandomState], int]


def word_starts(tokenizer: Tokenizer) -> np.ndarray:
    """Returns bool[vocab]: whether a token begins a word, by the mark of its kind of vocabulary: `##`, `Ġ` or `▁`."""
    names = [tokenizer.token(index) for index in range(tokenizer.vocab_size)]
    # WordPiece marks what continues a word, the others what begins one.
    if any(name.startswith("##") for name in names):
        return np.array([not name.startswith("##") for name in names])
    mark = max("Ġ▁", key=lambda m: sum(name.startswith(m) for name in names))
    return np.array([name.startswith(mark) for name in names])


def whole_words(tokens: np.ndarray, starts: np.ndarray, special: np.ndarray) -> list[Span]:
    """Returns the words in `tokens` as (first token, one past the last), without special tokens.

    Args:
      tokens: int[n].
      starts: bool[vocab], which tokens begin a word.
      special: bool[n], which positions are never masked; a word never spans one.
    """
    begins = starts[tokens] | special
    begins[1:] |= special[:-1]
    if len(begins):
        begins[0] = True
    edges = [*np.flatnonzero(begins).tolist(), len(tokens)]
    return [(a, b) for a, b in pairwise(edges) if not special[a]]


def choose_spans(words: list[Span], budget: int, draw: DrawLength, random: np.random.RandomState) -> list[Span]:
    """Draws non-overlapping n-grams of words with at most `budget` tokens in all, in the order of the text.

    As in `megatron/core/datasets/masked_dataset.py`.
    """
    chosen: list[Span] = []
    taken = np.zeros(words[-1][1] if words else 0, bool)
    left = budget
    for start in random.permutation(len(words)).tolist():
        if left == 0:
            break
        # Drawn for each word that is visited, chosen or not, as in Megatron.
        n = draw(random)
        # Fewer words where n would break the budget.
        while n and words[min(start + n, len(words)) - 1][1] - words[start][0] > left:
            n -= 1
        if n == 0:
            continue
        span = words[start][0], words[min(start + n, len(words)) - 1][1]
        # Words on both sides of a special token don't form an n-gram.
        if _contiguous(words[start : start + n]) and not taken[span[0] : span[1]].any():
            taken[span[0] : span[1]] = True
            chosen.append(span)
            left -= span[1] - span[0]
    return sorted(chosen)


def _contiguous(words: list[Span]) -> bool:
    return all(a[1] == b[0] for a, b in pairwise(words))


def harmonic(longest: int) -> DrawLength:
    """Lengths 1 to `longest` with probabilities proportional to 1/n: BERT's n-grams."""
    weights = 1.0 / np.arange(1, longest + 1)
    limits = np.cumsum(weights / weights.sum())
    return lambda random: int(min(np.searchsorted(limits, random.random_sample(), side="right"), longest - 1)) + 1


def geometric(longest: int, p: float) -> DrawLength:
    """Returns the distribution of lengths of T5's spans: geometric, cut off at `longest`."""
    return lambda random: min(int(random.geometric(p)), longest)
