"""SQuAD's metrics by the official rules: texts without case, punctuation, articles and spaces that are too many."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalised(text: str) -> str:
    """A text as answers are compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, right: str) -> float:
    """1 where two answers are the same, else 0."""
    return float(normalised(text) == normalised(right))


def text_f1(text: str, right: str) -> float:
    """F1 of the words of an answer; without words, 1 where both have none."""
    words, others = normalised(text).split(), normalised(right).split()
    if not words or not others:
        return float(words == others)
    common = sum((Counter(words) & Counter(others)).values())
    return 2 * common / (len(words) + len(others))
