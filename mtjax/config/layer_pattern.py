"""Patterns of layers: the kind of each layer of a hybrid model, in Megatron's letters."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from mtjax.errors import UserError, shortened

SIDE_BY_SIDE = "parallel"
"""Kind of the layers with Mamba-2 and attention side by side."""
SHARED: Mapping[str, str] = {"Z": "shared_1", "z": "shared_2"}
"""Letter of the Mamba-2 layers that read the first shared block, or the second (`mtjax.config.shared_blocks`) -> their
kind."""
KIND_OF: Mapping[str, str] = {
    "M": "mamba",
    "H": SIDE_BY_SIDE,
    **SHARED,
    "G": "delta",
    "*": "attention",
    "-": "mlp",
    "E": "experts",
}
"""Letter of a layer -> its kind, which is the name of its stack, and of its mixer if it has only one."""
MOST_LAYERS = 1_000

_ELSEWHERE = {
    "|": "a stage boundary (use layers_per_stage)",
    "/": "multi-token prediction (hybrid models have none)",
}
"""Characters of Megatron's patterns that have no layer here -> what they stand for."""
_PART = re.compile(r"\(([^()]*)\)x(\d+)|([^()])")


class LayerRun(NamedTuple):
    """Layers that one loop runs."""

    unit: str
    """Letters of an iteration."""
    times: int
    """Iterations."""


@cache
def expanded(pattern: str) -> str:
    """Writes out the repeats of a pattern: "(M-)x2*" is "M-M-*".

    Raises:
      UserError: it is not a pattern; names what is wrong.
    """
    letters, end = "", 0
    for part in _PART.finditer(pattern):
        if part.start() != end:
            break
        # Six digits are more layers than are allowed, and Python refuses to read thousands of digits.
        unit, times = (part[3], 1) if part[3] else (part[1], int(part[2][:6]))
        _check_letters(unit, pattern)
        if times < 1 or len(letters) + times * len(unit) > MOST_LAYERS:
            raise UserError(
                f"layer_pattern {shortened(pattern)!r} repeats ({unit}) {part[2] or 1} times, and a model has 1 to "
                f"{MOST_LAYERS} layers: use another number"
            )
        letters, end = letters + times * unit, part.end()
    if end != len(pattern):
        raise UserError(
            f"layer_pattern {shortened(pattern)!r} can't be read from {pattern[end : end + 8]!r} on: a repeat is "
            "letters in parentheses and how often they run, such as (M-M*-)x4"
        )
    return letters


def num_pattern_layers(pattern: str) -> int:
    """Returns the number of layers of a pattern; 0 for what is not one, which `expanded` names."""
    try:
        return len(expanded(pattern))
    except UserError:
        return 0


def _check_letters(letters: str, pattern: str) -> None:
    wrong = next((letter for letter in letters if letter not in KIND_OF), None)
    if letters and wrong is None:
        return
    kinds = (
        "M (Mamba-2), G (a gated delta net), * (attention), H (Mamba-2 and attention side by side), Z and z (Mamba-2 "
        "that reads a shared block), - (an MLP) and E (experts)"
    )
    if wrong is None:
        raise UserError(f"layer_pattern {shortened(pattern)!r} repeats () without layers: use the letters {kinds}")
    means = f", in Megatron {_ELSEWHERE[wrong]}" if wrong in _ELSEWHERE else ""
    raise UserError(f"layer_pattern {shortened(pattern)!r} contains {wrong!r}{means}: the letters are {kinds}")


@cache
def runs_of(letters: str) -> tuple[LayerRun, ...]:
    """Divides layers into loops, so that as few as possible are compiled: "M-M-M-M*-" is 3 x "M-", 1 x "M*-"."""
    return _fewest_compiled(letters, lambda unit, start, end: True)


def _fewest_compiled(letters: str, may_repeat: Callable[[str, int, int], bool]) -> tuple[LayerRun, ...]:
    """Divides layers into loops, so that as few as possible are compiled.

    Args:
      letters: of the layers.
      may_repeat: of a unit, and the start and end of its layers: whether one loop of several iterations may run them.
    """
    # A dynamic programme: best[end] are the layers to compile, and the loops, of the first `end` layers.
    best: list[tuple[int, tuple[LayerRun, ...]]] = [(0, ())]
    for end in range(1, len(letters) + 1):
        found = _last_runs(letters, end, best, may_repeat)
        best.append(min(found, key=lambda choice: (choice[0], len(choice[1]))))
    return best[-1][1]


def _last_runs(
    letters: str, end: int, best: list[tuple[int, tuple[LayerRun, ...]]], may_repeat: Callable[[str, int, int], bool]
) -> Iterator[tuple[int, tuple[LayerRun, ...]]]:
    """Yields the choices of the last loop of the first `end` layers, each after the best loops before it."""
    # Units of real models have a few layers; a bound keeps patterns of thousands of layers fast.
    for size in range(1, min(end, 64) + 1):
        unit, times = letters[end - size : end], 1
        while times * size <= end and letters[end - times * size : end - (times - 1) * size] == unit:
            start = end - times * size
            if times == 1 or may_repeat(unit, start, end):
                cost, runs = best[start]
                yield cost + size, (*runs, LayerRun(unit, times))
            times += 1


def shortened_pattern(letters: str) -> str:
    """Returns a short pattern of these layers: "(M-)x4M*-" for "M-M-M-M-M*-"."""
    # A short repeat is longer than what it stands for: MM, and not (M)x2.
    return "".join(min((f"({unit})x{times}", unit * times), key=len) for unit, times in runs_of(letters))


def loops_of_pattern(letters: str) -> tuple[LayerRun, ...]:
    """Returns the loops over the layers of a model or a chunk: those of `runs_of`, but several layers that run once
    and are the only ones of their kinds are a loop each."""
    loops: list[LayerRun] = []
    for run in runs_of(letters):
        are_single = run.times == 1 and all(letters.count(letter) == 1 for letter in run.unit)
        loops += [LayerRun(letter, 1) for letter in run.unit] if are_single else [run]
    return tuple(loops)


@cache
def joined_loops(letters: str) -> tuple[LayerRun, ...]:
    """Divides layers into loops that can hand on what is gathered for the next layer, so that as few as possible are
    compiled.

    Where a loop has several iterations, the layer after it has the loop's first letter, and the layer before it has the
    loop's last letter, so that an iteration can gather the layer after it, forward, and the layer before it, backward.
    The first loop counts as after the last layer. The last layer is in no loop of several iterations.
    """

    def hands_on(unit: str, start: int, end: int) -> bool:
        # For the first loop `start - 1` is -1: its lowest layer's backward pass gathers the last letter, which is
        # not read.
        return end < len(letters) and letters[end] == unit[0] and letters[start - 1] == unit[-1]

    return _fewest_compiled(letters, hands_on)


@cache
def common_pattern(patterns: tuple[str, ...]) -> str:
    """Returns a short pattern from which each of these results when layers are left out; their order is kept."""
    common, *others = dict.fromkeys(patterns)
    for pattern in others:
        common = _merged(common, pattern)
    return common


def _merged(first: str, second: str) -> str:
    """Returns the shortest pattern that contains the layers of both in their order, those of the first ahead."""
    # fewest[i][j]: letters of the shortest pattern of first[i:] and second[j:].
    fewest = [[len(first) - i + len(second) - j for j in range(len(second) + 1)] for i in range(len(first) + 1)]
    for i in reversed(range(len(first))):
        for j in reversed(range(len(second))):
            is_same = first[i] == second[j]
            fewest[i][j] = 1 + (fewest[i + 1][j + 1] if is_same else min(fewest[i + 1][j], fewest[i][j + 1]))
    merged, i, j = "", 0, 0
    while i < len(first) and j < len(second):
        is_same = first[i] == second[j]
        takes_first = is_same or fewest[i + 1][j] <= fewest[i][j + 1]
        merged += first[i] if takes_first else second[j]
        i, j = i + takes_first, j + (is_same or not takes_first)
    return merged + first[i:] + second[j:]
