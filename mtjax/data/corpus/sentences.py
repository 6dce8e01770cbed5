"""Splits text into sentences with `sentencex`, whose rules for some 240 languages come with the package."""

from collections.abc import Callable
from functools import partial

from mtjax.errors import require


def sentence_splitter(language: str = "en") -> Callable[[str], list[str]]:
    """Returns a function from text to its sentences, whose concatenation is the text.

    Args:
      language: ISO 639 code; one that the library doesn't know is split like its nearest relative.

    Raises:
      UserError: the library isn't installed.
    """
    return partial(require("sentencex", "data").segment, language)
