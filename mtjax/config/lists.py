"""Settings whose value is several names joined by commas, which may be typed in any order."""

from collections.abc import Sequence
from typing import Any

from mtjax.config.arguments import typed_options

LISTS = {"offload": ("optimizer", "parameters")}
"""Setting -> the names that it joins, in the order of a config."""


def in_order(setting: str, value: Any) -> Any:
    """Returns a value of a setting, its names in the order of a config if it has these names alone."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else []
    known = LISTS.get(setting, ())
    # What is not made of these names stays as it is, for the check that names it.
    return ",".join(sorted(names, key=known.index)) if names and set(names) <= set(known) else value


def options_in_order(argv: Sequence[str]) -> list[str]:
    """Returns a command line with the values of `LISTS` in order.

    Args:
      argv: arguments; an option is followed by its value, or contains it after `=`.
    """
    found = list(argv)
    for typed in typed_options(argv):
        if typed.setting in LISTS:
            typed.write(found, typed.option, in_order(typed.setting, typed.value))
    return found
