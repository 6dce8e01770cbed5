"""Suggestions for an option that a command does not have: by meaning first, then by spelling."""

import re
from collections.abc import Collection, Mapping

from mtjax.errors import nearest, shortened
from mtjax.migrate.megatron import by_name
from mtjax.migrate.other_tools import OTHERS

_N = re.compile(r"\bN\b")
"""Placeholder of a value in the text of a row."""


def refusal(unknown: Mapping[str, str | None], known: Collection[str]) -> str:
    """Returns the sentence about all options of a command line that a command does not have.

    Args:
      unknown: as typed, with the value that follows each.
      known: options of the command, as typed.
    """
    named = [f"{option}{advice(option, value, known)}" for option, value in unknown.items()]
    megatrons = [option for option in unknown if option.replace("_", "-").lower() in by_name()]
    translated = ". mtjax from-megatron -- OPTIONS translates all of Megatron-LM's at once"
    return f"no option is called {'; nor '.join(named)}" + translated * (len(megatrons) > 1 and "--mesh" in known)


def advice(option: str, value: str | None, known: Collection[str]) -> str:
    """Returns the text after "no option is called --x": the option with the same meaning, or the nearest in spelling.

    Args:
      option: as typed: `--lr`.
      value: what was typed after it, None for nothing.
      known: options of the command, as typed.
    """
    meant = meaning(option, value, known)
    return nearest(option, known) if meant is None else meant


def meaning(option: str, value: str | None, known: Collection[str]) -> str | None:
    """Returns the suggestion for an option of another tool; None for others, and if the command has no equivalent."""
    # Options of other tools may have underscores or capitals.
    name = option.replace("_", "-").lower()
    row = by_name().get(name)
    # Before Megatron's table: the same word (--batch-size) may mean several options, of which the command has one.
    for text in OTHERS.get(name.removeprefix("--"), ()):
        if _has(text, known):
            return f": use {_with(text, value)}"
    if row is None or "--num-layers" not in known:  # a command that trains nothing
        return None
    if row.status == "default":
        return f", and mtjax needs none: {row.note}"
    if row.status == "none":
        return f", and mtjax has no equivalent: {row.note}"
    if not _has(row.equal, known):
        return None
    note = f" ({_with(row.note, value)})" if row.note else ""
    return f": use {_with(row.equal, value)}{note}"


def _has(text: str, known: Collection[str]) -> bool:
    """Returns whether a command has the options that a text begins with; a text without options fits all commands."""
    options = re.findall(r"--[\w-]+", text.partition(" or ")[0])
    return not options or options[0] in known


def _with(text: str, value: str | None) -> str:
    # A function, as a value may have backslashes, which a replacement text interprets.
    return text if value is None else _N.sub(lambda _: shortened(value), text)
