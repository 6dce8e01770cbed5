"""What schedules cost, from their timetables alone; and the drawings of docs/pipeline.md.

    python benchmarks/schedules.py [--out docs/pipeline.png]

Draws 1F1B, interleaved and GPipe as `mtjax.theory.timetable` has them, and prints what they cost. Then the zero-bubble
schedule ZB-H1 (arXiv 2401.10241), which mtjax does not have, as an analysis: its backward pass is split into the
gradient of a chunk's input, which the stage before waits for, and that of its weights, which nobody waits for. Two
tables of it: in lock step, where a part of a tick takes its time if any stage has work in it; and as published, where
every stage goes on as soon as it can. No device is needed; a second.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console
from rich.table import Table

from mtjax.plan.timeline import columns, describe
from mtjax.theory.timetable import ScheduleName, Timetable, timetable

DRAWN: dict[str, tuple[ScheduleName, int]] = {
    "1F1B": ("1f1b", 1),
    "interleaved, two chunks of layers on each stage": ("interleaved", 2),
    "GPipe": ("gpipe", 1),
}
STAGES, MICROBATCHES = 4, 8
COLOURS = {"F": ("#4269d0", "#97bbf5"), "B": ("#3ca951", "#a3dcae"), "W": ("#efb118",)}
"""By chunk: forward, backward or the gradient of the input, the gradient of the weights."""
COMPARED = ((4, 8), (8, 32), (8, 128), (16, 64))
"""Stages and microbatches of the tables."""


class Cell(NamedTuple):
    """A piece of a stage's time."""

    stage: int
    start: float
    length: float
    kind: str
    text: str
    chunk: int = 0


# --- the schedules of mtjax


def cells_of(table: Timetable, costs: Mapping[str, float]) -> Iterator[Cell]:
    """A timetable to scale: a half takes its time on all stages."""
    now = 0.0
    for column in columns(table):
        kind = "B" if column.is_backward else "F"
        length = costs[kind] / table.chunks
        for stage, work in enumerate(column.half):
            if work is not None:
                yield Cell(stage, now, length, kind, describe(work, 1), work.chunk)
        now += length


def step_cost(table: Timetable, forward: float, backward: float) -> float:
    """A step's time in units in which a stage's layers take `forward` and `backward` for a microbatch."""
    return (table.forward_ticks * forward + table.backward_ticks * backward) / table.chunks


def costs_table() -> Table:
    """Bubble and microbatches in flight."""
    shown = Table(
        "stages", "microbatches", "schedule", "halves", "bubble", "in flight, first stage", "last", title="Schedules"
    )
    for stages, microbatches in COMPARED:
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("gpipe", 1)):
            table = timetable(schedule, stages, microbatches, chunks)
            flying = [table.in_flight(s) / chunks for s in (0, stages - 1)]
            name = f"{schedule} x{chunks}" if chunks > 1 else schedule
            halves = f"{table.forward_ticks} + {table.backward_ticks}"
            shown.add_row(
                str(stages), str(microbatches), name, halves, f"{table.bubble:.1%}", *(f"{n:g}" for n in flying)
            )
    return shown


# --- zero bubble


@dataclass(frozen=True)
class Costs:
    """Time of a microbatch on a stage."""

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    again: float = 0
    """Computing the chunk again, before its backward pass."""
    weights_alone: float = 1
    """The weights' gradient where it is not computed together with the input's."""

    @property
    def backward(self) -> float:
        """Both gradients, computed together."""
        return self.again + self.input_gradient + self.weight_gradient


KEPT = Costs()
"""Residuals and cotangents wait for the second part: nothing is computed twice."""
RECOMPUTED = Costs(again=1, weights_alone=3)
"""Only the input waits: the second part computes the chunk and its cotangents again."""


def lock_step(stages: int, microbatches: int, costs: Costs) -> float:
    """A step of ZB-H1 in lock step.

    Forward and input gradients pass through the stages one tick after the other and have (p-1) parts more than
    microbatches, whatever is done; only the weights' gradients, for which nobody waits, can be done by all stages at
    the same time. So (p-1) of those parts are saved, of a bubble of (p-1) of all three.
    """
    parts = microbatches + stages - 1
    return parts * (costs.forward + costs.again + costs.input_gradient) + microbatches * costs.weights_alone


def lock_step_cells(stages: int, microbatches: int) -> Iterator[Cell]:
    """The table of `lock_step` where all parts take as long: weights' gradients wait for the first stage's input's."""
    now, last = 0.0, stages - 1
    for tick in range(microbatches + 2 * last):
        turns = {
            "F": [tick - s for s in range(stages)],
            "B": [tick - last - (last - s) for s in range(stages)],
            "W": [tick - 2 * last] * stages,
        }
        for kind, wanted in turns.items():
            at_work = [(s, i) for s, i in enumerate(wanted) if 0 <= i < microbatches]
            yield from (Cell(s, now, 1, kind, str(i)) for s, i in at_work)
            now += bool(at_work)


def published_order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """What a stage does in ZB-H1: 1F1B, with weights' gradients put off by a microbatch for each stage before it."""
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches):
        order += [("F", ahead + i)] if ahead + i < microbatches else []
        order += [("B", i)] + ([("W", i - stage)] if i >= stage else [])
    return order + [("W", i) for i in range(max(microbatches - stage, 0), microbatches)]


def as_published(stages: int, microbatches: int) -> list[Cell]:
    """ZB-H1 without lock step: every stage goes on as soon as what it needs is there; all three take as long."""
    left = [published_order(s, stages, microbatches) for s in range(stages)]
    ready: dict[tuple[str, int, int], float] = {}
    cells, clock = [], [0.0] * stages
    while any(left):
        for stage in range(stages):
            if not left[stage]:
                continue
            kind, i = left[stage][0]
            before = {"F": stage - 1, "B": stage + 1, "W": -1}[kind]
            if 0 <= before < stages and (kind, before, i) not in ready:
                continue
            start = max(clock[stage], ready.get((kind, before, i), 0.0))
            cells.append(Cell(stage, start, 1, kind, str(i)))
            clock[stage] = ready[kind, stage, i] = start + 1
            left[stage].pop(0)
    return cells


def zero_bubble_table() -> Table:
    """Steps of ZB-H1 against those of 1F1B and of interleaving, with and without recomputation."""
    heads = ("stages", "microbatches", "1F1B", "in lock step", "as published", "interleaved x2", "x4")
    shown = Table(*heads, "1F1B, recomputed", "in lock step, recomputed", title="Time of a step, F = B = W = 1")
    for stages, microbatches in COMPARED:
        plain = timetable("1f1b", stages, microbatches)
        base, again = (step_cost(plain, costs.forward, costs.backward) for costs in (KEPT, RECOMPUTED))
        split = [lock_step(stages, microbatches, costs) for costs in (KEPT, RECOMPUTED)]
        published = max(cell.start + cell.length for cell in as_published(stages, microbatches))
        by_chunks = [step_cost(timetable("interleaved", stages, microbatches, v), 1, KEPT.backward) for v in (2, 4)]
        cells = [f"{n:g} ({n / base - 1:+.1%})" for n in (split[0], published, *by_chunks)]
        shown.add_row(
            str(stages),
            str(microbatches),
            f"{base:g}",
            *cells,
            f"{again:g}",
            f"{split[1]:g} ({split[1] / again - 1:+.1%})",
        )
    return shown


# --- drawing


def draw(axes: Axes, cells: list[Cell], stages: int, title: str) -> None:
    """Rows of stages, time to the right."""
    for cell in cells:
        colours = COLOURS[cell.kind]
        place = (cell.start, cell.stage - 0.4)
        axes.add_patch(
            Rectangle(place, cell.length, 0.8, facecolor=colours[cell.chunk], edgecolor="white", linewidth=0.8)
        )
        middle = cell.start + cell.length / 2
        axes.text(
            middle,
            cell.stage,
            cell.text,
            ha="center",
            va="center",
            fontsize=7,
            color="black" if cell.chunk else "white",
        )
    end = max(cell.start + cell.length for cell in cells)
    axes.set(ylim=(stages - 0.4, -0.6), yticks=range(stages), title=f"{title}: {end:g}")
    axes.set_yticklabels([f"stage {s}" for s in range(stages)])
    axes.title.set_fontsize(10)
    axes.spines[["top", "right"]].set_visible(False)


def picture() -> Figure:
    """All schedules, on one scale of time."""
    panels = {
        name: list(cells_of(timetable(schedule, STAGES, MICROBATCHES, chunks), {"F": 1, "B": 2}))
        for name, (schedule, chunks) in DRAWN.items()
    }
    panels["zero bubble (ZB-H1) in lock step, not in mtjax"] = list(lock_step_cells(STAGES, MICROBATCHES))
    panels["zero bubble (ZB-H1) as published, not in mtjax"] = as_published(STAGES, MICROBATCHES)
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True)
    for axes, (title, cells) in zip(rows, panels.items(), strict=True):
        draw(axes, cells, STAGES, title)
    rows[-1].set_xlim(0, max(cell.start + cell.length for cells in panels.values() for cell in cells))
    rows[-1].set_xlabel(
        "time, where a stage's forward pass takes 1, and the gradients of its inputs and of its weights 1 each\n"
        "blue: forward; green: backward, or gradient of inputs; orange: gradient of weights; pale: the second chunk"
    )
    return figure


def main(out: Path = Path(__file__).parents[1] / "docs" / "pipeline.png") -> None:
    """Prints the tables and draws the picture."""
    console = Console(width=160)
    console.print(costs_table())
    console.print(zero_bubble_table())
    picture().savefig(out, dpi=100)
    console.print(f"drawn: {out}")


if __name__ == "__main__":
    tyro.cli(main)
