"""Settings whose value is several names joined by commas, which may be typed in any order."""

from collections.abc import Sequence
from typing import Any

LISTS = {"offload": ("optimizer", "parameters")}
"""Setting -> the names that it joins, in the order of a config."""


def in_order(setting: str, value: Any) -> Any:
    """Returns a value of a setting, its names in the order of a config if it has these names alone."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else []
    known = LISTS.get(setting, ())
    return ",".join(sorted(names, key=known.index)) if names and set(names) <= set(known) else value


def options_in_order(argv: Sequence[str]) -> list[str]:
    """Returns a command line with the values of `LISTS` in order.

    Args:
      argv: arguments; an option is followed by its value, or contains it after `=`.
    """
    found = list(argv)
    for i, argument in enumerate(argv):
        option, equals, value = argument.partition("=")
        setting = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or setting not in LISTS:
            continue
        if equals:
            found[i] = f"{option}={in_order(setting, value)}"
        elif i + 1 < len(argv):
            found[i + 1] = in_order(setting, argv[i + 1])
    return found
