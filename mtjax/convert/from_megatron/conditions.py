"""Conditions of a bash script: `[ ... ]`, `[[ ... ]]`, as far as they can be decided without running anything."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence

from mtjax.convert.from_megatron.expand import unknown_in

Decided = bool | None
"""None: it can't be decided."""

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
}
_FILES = ("-e", "-f", "-d", "-s", "-r", "-w", "-x")


def decide(words: Sequence[str]) -> Decided:
    """Returns whether a condition holds; None where that takes the machine of the run, or a variable without a value.

    Args:
      words: those between the brackets, with their variables put in; `&&` and `||` among them.
    """
    for operator, old in (("||", "-o"), ("&&", "-a")):
        at = next((i for i, word in enumerate(words) if word in (operator, old)), None)
        if at is not None:
            return both(decide(words[:at]), operator, decide(words[at + 1 :]))
    if words[:1] == ["!"]:
        found = decide(words[1:])
        return None if found is None else not found
    if len(words) == 1:
        return None if unknown_in(words[0]) else bool(words[0])
    if len(words) == 2:
        return _of_one(*words)
    return _of_two(*words) if len(words) == 3 else None


def both(left: Decided, operator: str, right: Decided) -> Decided:
    """Returns what `left && right`, or `left || right`, is."""
    decisive = operator == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def _of_one(operator: str, word: str) -> Decided:
    is_empty = not word or bool(unknown_in(word))  # what nobody has set is empty
    if operator in ("-z", "-n"):
        return is_empty == (operator == "-z")
    return True if operator in _FILES else None  # files of the run: a script ends where they are missing


def _of_two(left: str, operator: str, right: str) -> Decided:
    if unknown_in(left + right):
        return None
    if operator in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](int(left), int(right))
        except ValueError:
            return None
    return None
