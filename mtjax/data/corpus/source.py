"""The meaning of `--data`: one or more datasets, each text files or an indexed dataset, with or without weights."""

from dataclasses import dataclass
from pathlib import Path

from mtjax.data.corpus.indexed import bin_path, idx_path, is_indexed
from mtjax.data.corpus.reader import expand
from mtjax.data.corpus.words import Word, split_words
from mtjax.errors import UserError


@dataclass(frozen=True)
class Source:
    """A dataset before it is opened.

    Attributes:
      name: what messages call it.
      paths: a prefix of an indexed dataset, or paths and globs of text; empty for the default corpus.
      weight: its share in a blend, None when none is given.
    """

    name: str
    paths: tuple[str, ...]
    weight: float | None


def parse_sources(text: str) -> list[Source]:
    """Returns the datasets that `FILE`, `A B`, or `0.3 A 0.7 B` name; the default corpus when the text is empty.

    Datasets are separated by spaces, and several files of one dataset by commas; quote a path that has either.

    Raises:
      UserError: weights for some but not all, a file that doesn't exist, or a quote without its end.
    """
    if not text.strip():
        return [Source("the default corpus", (), None)]
    # What exists as it was typed is one path, spaces and commas included.
    words = [Word((text,))] if Path(text).expanduser().exists() or is_indexed(text) else split_words(text)
    # Numbers are weights: a file whose name is a number is typed with its folder, ./0.3.
    numbers = [_number(word) for word in words]
    if all(n is None for n in numbers):
        return [_source(word, None) for word in words]
    pairs = list(zip(numbers[::2], words[1::2], strict=False))
    if len(words) % 2 or any(n is None for n in numbers[::2]) or any(n is not None for n in numbers[1::2]):
        raise UserError(f"data {text!r} should be datasets only, or a weight before each: 0.3 A 0.7 B")
    return [_source(word, weight) for weight, word in pairs]


def _number(word: Word) -> float | None:
    try:
        return float(str(word))
    except ValueError:
        return None


def _source(chosen: Word, weight: float | None) -> Source:
    word = str(chosen)
    for suffix in (".bin", ".idx"):
        if word.endswith(suffix) and is_indexed(word.removesuffix(suffix)):
            word = word.removesuffix(suffix)
    prefix = str(Path(word).expanduser())
    if bin_path(prefix).is_file() or idx_path(prefix).is_file():
        missing = next((p for p in (bin_path(prefix), idx_path(prefix)) if not p.is_file()), None)
        if missing is not None:
            raise UserError(f"{missing} does not exist, and {prefix} needs both its .bin and its .idx")
        return Source(prefix, (prefix,), weight)
    # For its error: a run should not begin with text that is not there.
    expand(chosen.pieces)
    return Source(word, chosen.pieces, weight)
