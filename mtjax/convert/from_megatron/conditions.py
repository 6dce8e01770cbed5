"""Evaluates conditions of a bash script, `[ ... ]` and `[[ ... ]]`, without running commands."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence

from mtjax.convert.from_megatron.expand import unknown_in

Decided = bool | None
"""None: unknown."""

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
    """Returns whether a condition is true; None if it depends on a variable without a value, or is not supported.

    Args:
      words: the words between the brackets, expanded, including `&&` and `||`.
    """
    # Or first: it binds more loosely, so the text is divided there before it is divided at and.
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
    """Returns `left && right` or `left || right` in three-valued logic."""
    decisive = operator == "||"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def _of_one(operator: str, word: str) -> Decided:
    """Evaluates `-z WORD`, `-n WORD` and tests of files."""
    is_empty = not word or bool(unknown_in(word))  # an unset variable is empty
    if operator in ("-z", "-n"):
        return is_empty == (operator == "-z")
    return True if operator in _FILES else None  # files are assumed to exist: scripts exit if one is missing


def _of_two(left: str, operator: str, right: str) -> Decided:
    """Evaluates comparisons of strings and integers."""
    if unknown_in(left + right):
        return None
    if operator in ("=", "=="):
        # In [[ ]] the right side is a pattern. In [ ] it is not, but a script that compares with a text that has * is
        # rare.
        return fnmatch.fnmatchcase(left, right)
    if operator == "!=":
        return not fnmatch.fnmatchcase(left, right)
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](int(left), int(right))
        except ValueError:
            return None
    return None
