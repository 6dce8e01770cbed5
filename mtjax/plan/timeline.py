"""Pipeline timetables as text: a line for each stage, a column for each half tick that is run.

All stages are in the same half of the same tick at any time, so that column heads show whether it is forward or
backward, and a cell shows the microbatch and, where stages have several, the chunk:

             F F B F B F B B
    stage 0  0 1 . 2 0 . 1 2
    stage 1  . 0 0 1 1 2 2 .

Stages and microbatches are counted from 0, as ranks are.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from rich.text import Text

from mtjax.layout.timetable import Half, Timetable, Work

IDLE = "\N{MIDDLE DOT}"
LEFT_OUT = "\N{HORIZONTAL ELLIPSIS}"
MOST_STAGES = 16
"""Most rows; of more stages the middle ones are omitted."""
FORWARD_STYLES = ("blue", "bright_blue", "cyan", "bright_cyan")
BACKWARD_STYLES = ("green", "bright_green", "yellow", "bright_yellow")
"""By chunk; beyond the last they repeat."""

Item = TypeVar("Item")


class Column(NamedTuple):
    """Half a tick in which some stage has work."""

    tick: int
    is_backward: bool
    half: Half


def columns(table: Timetable) -> list[Column]:
    """Returns the halves that are run, in the order of time."""
    pairs = enumerate(zip(table.forward, table.backward, strict=True))
    both = (Column(tick, bool(i), half) for tick, pair in pairs for i, half in enumerate(pair))
    # Half of a tick in which no stage works is not run: `mtjax.sharding.pipeline.executor` skips it.
    return [column for column in both if any(column.half)]


def abridged(items: Sequence[Item], most: int) -> list[Item | None]:
    """Returns at most `most` items, the first and the last ones, with one None in place of those omitted."""
    if len(items) <= most:
        return list(items)
    first = most // 2
    # One place is the mark of what is left out.
    last = most - 1 - first
    return [*items[:first], None, *items[len(items) - last :]]


def describe(work: Work, chunks: int) -> str:
    """Returns "3" for the fourth microbatch, or "3b" where a stage has several chunks."""
    return f"{work.microbatch}{chunk_name(work.chunk) if chunks > 1 else ''}"


def chunk_name(chunk: int) -> str:
    """Returns the name of a chunk: a, b, ..., z, aa, ab, ..."""
    before, letter = divmod(chunk, 26)
    return (chunk_name(before - 1) if before else "") + chr(ord("a") + letter)


def lines(table: Timetable, width: int) -> list[Text]:
    """Returns the lines of the text: column heads, and a line for each stage.

    Args:
      table: of a training step or a forward pass.
      width: characters in a line; columns in the middle, where the steady state repeats itself, are omitted.
    """
    works = [work for half in (*table.forward, *table.backward) for work in half if work is not None]
    cell = 1 + max(len(describe(work, table.chunks)) for work in works)
    label = len(f"stage {table.stages - 1} ")
    shown = abridged(columns(table), max((width - label) // cell, 3))
    heads = Text(" " * label)
    for column in shown:
        name = LEFT_OUT if column is None else "B" if column.is_backward else "F"
        heads.append(f" {name}".ljust(cell), style="bold")
    rows = [heads]
    for stage in abridged(range(table.stages), MOST_STAGES):
        if stage is None:
            rows.append(Text(LEFT_OUT.ljust(label)))
            continue
        rows.append(Text(f"stage {stage}".ljust(label)))
        for column in shown:
            rows[-1].append(*_cell(column, stage, table.chunks, cell))
    return rows


def _cell(column: Column | None, stage: int, chunks: int, width: int) -> tuple[str, str]:
    """Returns the text and style of a cell."""
    if column is None:
        return LEFT_OUT.rjust(2).ljust(width), "dim"
    work = column.half[stage]
    if work is None:
        return IDLE.rjust(2).ljust(width), "dim"
    styles = BACKWARD_STYLES if column.is_backward else FORWARD_STYLES
    return f" {describe(work, chunks)}".ljust(width), styles[work.chunk % len(styles)]


def legend(table: Timetable) -> str:
    """Returns the legend of `lines`."""
    chunks = f" and the letter of the chunk ({table.chunks} per stage)" if table.chunks > 1 else ""
    return f"F forward, B backward; cells: number of the microbatch{chunks}; {IDLE} idle"
