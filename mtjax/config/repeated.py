"""Options that add up where they are given several times: `--data A --data B` is `--data 'A B'`, a blend."""

from collections.abc import Sequence
from pathlib import Path

SPACES = " \t\r\n"
ADDED = ("--data", "--train-data", "--valid-data", "--test-data")


def quoted(path: str) -> str:
    """Returns a path as `--data` reads it: in quotes where it has a space or a comma."""
    special = not path or any(character in "'\"\\," or character in SPACES for character in path)
    return "'" + path.replace("'", "'\"'\"'") + "'" if special else path


def with_joined_data(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a command line with each of these options once, and `--data A B` for each that was there several times;
    a single value stays as it was typed, as it may be a blend.

    After `None`, which removes what a config has, an option begins anew.
    """
    found: dict[str, list[str]] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        name = option.replace("_", "-")
        if name not in ADDED:
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:  # the parser says what is missing
            rest.append(word)
            continue
        values = found.setdefault(name, [])
        if "None" in (value, *values):
            values.clear()
        values.append(value)
    joined = {name: values[0] if len(values) == 1 else " ".join(map(_word, values)) for name, values in found.items()}
    notes = [f"{name} {joined[name]}" for name, values in found.items() if len(values) > 1]
    return [*rest, *(word for pair in joined.items() for word in pair)], notes


def _word(value: str) -> str:
    """Returns a value as a part of a blend: a path that exists as it was typed has no words."""
    # Megatron's datasets are named by a prefix, which does not exist itself.
    is_path = Path(value).expanduser().exists() or Path(f"{value}.idx").expanduser().exists()
    return quoted(value) if is_path else value
