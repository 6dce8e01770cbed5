"""Options that may be given more than once."""

import shlex
from collections.abc import Sequence
from pathlib import Path

DATASETS = ("--data", "--train-data", "--valid-data", "--test-data")
"""Options whose values are joined."""


def with_joined_data(argv: Sequence[str]) -> Sequence[str]:
    """Returns `argv`, in which `--data A --data B` is `--data 'A B'`; a value that is the path of a file is quoted."""
    words: list[str] = []
    given: dict[str, list[str]] = {}
    rest = iter(argv)
    for word in rest:
        option, equals, value = word.partition("=")
        name = option.replace("_", "-")
        if name not in DATASETS:
            words.append(word)
        elif (value := value if equals else next(rest, None)) is None:
            return argv
        else:
            given.setdefault(name, []).append(value)
    if all(len(values) == 1 for values in given.values()):
        return argv
    for name, values in given.items():
        words += [name, " ".join(shlex.quote(v) if len(values) > 1 and Path(v).exists() else v for v in values)]
    return words
