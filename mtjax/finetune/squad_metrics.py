"""SQuAD's official metrics: texts are compared without case, punctuation, articles and extra spaces."""

import re
import string
from collections import Counter

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Normalizes a text for comparison."""
    # In the order of evaluate-v2.0.py: with punctuation left, "the." would keep its article.
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, right: str) -> float:
    """Returns 1 if two answers are equal, else 0."""
    return float(normalized(text) == normalized(right))


def text_f1(text: str, right: str) -> float:
    """Returns F1 of the words of an answer; if one has no words, 1 if both have none, else 0."""
    words, right_words = normalized(text).split(), normalized(right).split()
    if not words or not right_words:
        return float(words == right_words)
    common = sum((Counter(words) & Counter(right_words)).values())
    return 2 * common / (len(words) + len(right_words))
