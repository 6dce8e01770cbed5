"""`mtjax data parts`: how far the parts of a run of `preprocess --part` are, on all machines that share its folder."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from mtjax.cli import read, run_main
from mtjax.data.corpus.parts import complete_parts, part_datasets, part_progress
from mtjax.errors import UserError

SHOWN = 20
"""Parts that are listed one by one."""
# 24 times the default of --save-every.
SILENT = 120.0
"""Seconds without news after which a part that is not complete is taken for interrupted."""


@dataclass(frozen=True)
class Options:
    """Says how many parts are complete, how far the others are, and which to run again."""

    prefix: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PREFIX")]
    """What was --output of preprocess --part."""


class Begun(NamedTuple):
    """A part that is not complete."""

    number: int
    share: float
    text_bytes: int
    seconds: float
    """Since its last news."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return run_main(lambda: run(read(Options, argv, "mtjax data parts")))


def run(options: Options) -> None:
    """Prints the state of the parts.

    Raises:
      UserError: there are none.
    """
    found = [*part_datasets(options.prefix).values(), *part_progress(options.prefix).values()]
    numbers = sorted({part.of for parts in found for part in parts})
    if not numbers:
        raise UserError(
            f"there is no part of {options.prefix}: give what is --output of preprocess --part; a part has its first "
            "record after --save-every seconds"
        )
    for of in numbers:
        print(summary(options.prefix, of))
        for line in _lines(options.prefix, of):
            print(f"  {line}")


def summary(output: Path, of: int) -> str:
    """Returns one line on all parts."""
    complete, begun = complete_parts(output, of), begun_parts(output, of)
    share = (len(complete) + sum(part.share for part in begun)) / of
    rest = of - len(complete) - len(begun)
    return f"{output}: {share:.0%} of {of} parts: {len(complete)} complete, {len(begun)} begun, {rest} not begun"


def begun_parts(output: Path, of: int) -> list[Begun]:
    """Returns the parts that are at work or were interrupted, by number."""
    found: dict[int, Begun] = {}
    for parts in part_progress(output).values():
        for part, path in parts.items():
            if part.of != of:
                continue
            try:
                saved = json.loads(path.read_text())
                age = max(time.time() - path.stat().st_mtime, 0.0)
                found[part.number] = Begun(part.number, saved["share"], saved["counts"]["text_bytes"], age)
            except (OSError, ValueError, KeyError, TypeError):  # complete by now, or of an earlier version
                continue
    return [found[number] for number in sorted(found)]


def _lines(output: Path, of: int) -> list[str]:
    begun, complete = begun_parts(output, of), complete_parts(output, of)
    lines = []
    for part in begun[:SHOWN]:
        news = f"{part.seconds:.0f} s ago"
        state = f"no news since {news}: run it again" if part.seconds > SILENT else f"saved {news}"
        lines.append(f"part {part.number}: {part.share:.0%}, {part.text_bytes / 1e6:,.1f} MB of text, {state}")
    if more := len(begun) - SHOWN:
        lines += [f"and {more} more"] if more > 0 else []
    idle = sorted(set(range(1, of + 1)) - complete - {part.number for part in begun})
    return [*lines, f"not begun: {_ranges(idle)}"] if idle else lines


def _ranges(numbers: Sequence[int]) -> str:
    """Returns `1-4,7`, as Slurm's --array takes it."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
