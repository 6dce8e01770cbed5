"""`--input` of the commands that read text: several of them, and several files in one, separated by commas."""

import sys
from collections.abc import Sequence

from mtjax.data.corpus.reader import expand
from mtjax.data.corpus.words import split_words
from mtjax.errors import UserError


def with_all(argv: Sequence[str] | None, *options: str) -> list[str]:
    """Returns a command line in which options that were given several times have all values at the first place.

    Args:
      argv: arguments; those of the process when None.
      options: each takes several values.
    """
    words: list[str] = []
    values: dict[str, list[str]] = {}
    current: list[str] | None = None
    name_positions: list[tuple[int, str]] = []
    for word in sys.argv[1:] if argv is None else argv:
        option, equals, value = word.partition("=")
        name = option.replace("_", "-")
        # argparse, on which tyro is built, keeps the last occurrence alone.
        if name in options:
            if name not in values:
                name_positions.append((len(words), name))
            current = values.setdefault(name, [])
            current += [value] if equals else []
        elif current is not None and not word.startswith("--"):
            current.append(word)
        else:
            current = None
            words.append(word)
    # From the back, so that earlier places keep their numbers.
    for at, name in reversed(name_positions):
        words[at:at] = [name, *values[name]]
    return words


def input_files(values: Sequence[str]) -> list[str]:
    """Returns the files that values of `--input` name: each a path, glob or URL, or several between commas.

    A path with a comma is in quotes within the value, `--input "'a,b.jsonl',c.jsonl"`, or exists as it was typed.

    Raises:
      UserError: no file matches, or a quote has no end.
    """
    files: list[str] = []
    for value in values:
        # The value as it was typed is tried first: a path may have commas.
        try:
            files += expand([value])
        except UserError:
            pieces = [piece for word in split_words(value) for piece in word.pieces]
            if pieces == [value]:
                raise
            files += expand(pieces)
    return files
