"""Costs of pipeline schedules, computed from their timetables; and the plots of docs/pipeline.md.

    python benchmarks/schedules.py [--out docs/pipeline.png]

Plots the timetables of 1F1B, interleaved and GPipe from `mtjax.layout.timetable`, and prints their costs. Then analyzes
the zero-bubble schedule ZB-H1 (arXiv 2401.10241), which mtjax does not implement: its backward pass is split into the
gradient of a chunk's input, which the previous stage waits for, and that of its weights, which no stage waits for. Two
timetables of it: in lockstep, where a half of a tick takes its full time if any stage has work in it; and as
published, where every stage continues as soon as its inputs are available. Needs no device; takes a second.
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

from mtjax.layout.timetable import ScheduleName, Timetable, timetable
from mtjax.plan.timeline import columns, describe

DRAWN: dict[str, tuple[ScheduleName, int]] = {
    "1F1B": ("1f1b", 1),
    "interleaved, two chunks of layers on each stage": ("interleaved", 2),
    "GPipe": ("gpipe", 1),
}
STAGES, MICROBATCHES = 4, 8
COLORS = {"F": ("#4269d0", "#97bbf5"), "B": ("#3ca951", "#a3dcae"), "W": ("#efb118",)}
"""Colors by chunk: forward, backward or input gradient, weight gradient."""
COMPARED = ((4, 8), (8, 32), (8, 128), (16, 64))
"""Numbers of stages and microbatches of the tables."""


class Cell(NamedTuple):
    """A rectangle of a stage's timeline."""

    stage: int
    start: float
    length: float
    kind: str
    text: str
    chunk: int = 0


# --- the schedules of mtjax


def cells_of(table: Timetable, costs: Mapping[str, float]) -> Iterator[Cell]:
    """Yields the cells of a timetable, in which a half takes the same time on all stages."""
    now = 0.0
    for column in columns(table):
        kind = "B" if column.is_backward else "F"
        length = costs[kind] / table.chunks
        for stage, work in enumerate(column.half):
            if work is not None:
                yield Cell(stage, now, length, kind, describe(work, 1), work.chunk)
        now += length


def step_cost(table: Timetable, forward: float, backward: float) -> float:
    """Returns a step's time if a stage takes `forward` and `backward` for a microbatch."""
    return (table.forward_ticks * forward + table.backward_ticks * backward) / table.chunks


def costs_table() -> Table:
    """Builds the table of bubbles and microbatches in flight."""
    rows_table = Table(
        "stages", "microbatches", "schedule", "halves", "bubble", "in flight, first stage", "last", title="Schedules"
    )
    for stages, microbatches in COMPARED:
        for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("gpipe", 1)):
            table = timetable(schedule, stages, microbatches, chunks)
            in_flight = [table.in_flight(s) / chunks for s in (0, stages - 1)]
            name = f"{schedule} x{chunks}" if chunks > 1 else schedule
            halves = f"{table.forward_ticks} + {table.backward_ticks}"
            rows_table.add_row(
                str(stages), str(microbatches), name, halves, f"{table.bubble:.1%}", *(f"{n:g}" for n in in_flight)
            )
    return rows_table


# --- zero bubble


@dataclass(frozen=True)
class Costs:
    """Times of a microbatch on a stage."""

    forward: float = 1
    input_gradient: float = 1
    weight_gradient: float = 1
    recompute: float = 0
    """Recomputing the chunk before its backward pass."""
    weights_alone: float = 1
    """The weight gradient if it is computed separately from the input gradient."""

    @property
    def backward(self) -> float:
        """Time of both gradients, computed together."""
        return self.recompute + self.input_gradient + self.weight_gradient


SAVED = Costs()
"""Residuals and cotangents are saved for the weight gradient: nothing is recomputed."""
RECOMPUTED = Costs(recompute=1, weights_alone=3)
"""Only the input is saved: the weight gradient recomputes the chunk and its cotangents."""


def lock_step(stages: int, microbatches: int, costs: Costs) -> float:
    """Returns the time of a step of ZB-H1 in lockstep.

    Forward passes and input gradients traverse the stages in successive ticks, and so take (p-1) ticks more than
    microbatches; only weight gradients, which no stage waits for, can be computed by all stages at the same time.
    Lockstep thus saves (p-1) weight gradients of a bubble of (p-1) of all three.
    """
    ticks = microbatches + stages - 1
    return ticks * (costs.forward + costs.recompute + costs.input_gradient) + microbatches * costs.weights_alone


def lock_step_cells(stages: int, microbatches: int) -> Iterator[Cell]:
    """Yields the cells of `lock_step` if F, B and W take equal time: W follows B of the first stage."""
    now, last = 0.0, stages - 1
    for tick in range(microbatches + 2 * last):
        microbatch_of = {
            "F": [tick - s for s in range(stages)],
            "B": [tick - last - (last - s) for s in range(stages)],
            "W": [tick - 2 * last] * stages,
        }
        for kind, by_stage in microbatch_of.items():
            active = [(s, i) for s, i in enumerate(by_stage) if 0 <= i < microbatches]
            yield from (Cell(s, now, 1, kind, str(i)) for s, i in active)
            now += bool(active)


def published_order(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    """Returns a stage's order in ZB-H1: 1F1B, with W delayed by a microbatch for each previous stage."""
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", i) for i in range(ahead)]
    for i in range(microbatches):
        order += [("F", ahead + i)] if ahead + i < microbatches else []
        order += [("B", i)] + ([("W", i - stage)] if i >= stage else [])
    return order + [("W", i) for i in range(max(microbatches - stage, 0), microbatches)]


def as_published(stages: int, microbatches: int) -> list[Cell]:
    """Simulates ZB-H1 without lockstep: a stage continues once its input is ready; F, B and W take equal time."""
    pending = [published_order(s, stages, microbatches) for s in range(stages)]
    ready: dict[tuple[str, int, int], float] = {}
    cells, clock = [], [0.0] * stages
    while any(pending):
        for stage in range(stages):
            if not pending[stage]:
                continue
            kind, i = pending[stage][0]
            before = {"F": stage - 1, "B": stage + 1, "W": -1}[kind]
            if 0 <= before < stages and (kind, before, i) not in ready:
                continue
            start = max(clock[stage], ready.get((kind, before, i), 0.0))
            cells.append(Cell(stage, start, 1, kind, str(i)))
            clock[stage] = ready[kind, stage, i] = start + 1
            pending[stage].pop(0)
    return cells


def zero_bubble_table() -> Table:
    """Builds the table of ZB-H1 against 1F1B and interleaved, with and without recompute."""
    heads = ("stages", "microbatches", "1F1B", "in lockstep", "as published", "interleaved x2", "x4")
    rows_table = Table(*heads, "1F1B, recomputed", "in lockstep, recomputed", title="Time of a step, F = B = W = 1")
    for stages, microbatches in COMPARED:
        plain = timetable("1f1b", stages, microbatches)
        base, recomputed = (step_cost(plain, costs.forward, costs.backward) for costs in (SAVED, RECOMPUTED))
        split = [lock_step(stages, microbatches, costs) for costs in (SAVED, RECOMPUTED)]
        published = max(cell.start + cell.length for cell in as_published(stages, microbatches))
        by_chunks = [step_cost(timetable("interleaved", stages, microbatches, v), 1, SAVED.backward) for v in (2, 4)]
        cells = [f"{n:g} ({n / base - 1:+.1%})" for n in (split[0], published, *by_chunks)]
        rows_table.add_row(
            str(stages),
            str(microbatches),
            f"{base:g}",
            *cells,
            f"{recomputed:g}",
            f"{split[1]:g} ({split[1] / recomputed - 1:+.1%})",
        )
    return rows_table


# --- drawing


def draw(axes: Axes, cells: list[Cell], stages: int, title: str) -> None:
    """Draws cells with stages as rows and time to the right."""
    for cell in cells:
        colors = COLORS[cell.kind]
        corner = (cell.start, cell.stage - 0.4)
        axes.add_patch(
            Rectangle(corner, cell.length, 0.8, facecolor=colors[cell.chunk], edgecolor="white", linewidth=0.8)
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
    """Plots all schedules on the same time axis."""
    panels = {
        name: list(cells_of(timetable(schedule, STAGES, MICROBATCHES, chunks), {"F": 1, "B": 2}))
        for name, (schedule, chunks) in DRAWN.items()
    }
    panels["zero bubble (ZB-H1) in lockstep, not in mtjax"] = list(lock_step_cells(STAGES, MICROBATCHES))
    panels["zero bubble (ZB-H1) as published, not in mtjax"] = as_published(STAGES, MICROBATCHES)
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True)
    for axes, (title, cells) in zip(rows, panels.items(), strict=True):
        draw(axes, cells, STAGES, title)
    rows[-1].set_xlim(0, max(cell.start + cell.length for cells in panels.values() for cell in cells))
    rows[-1].set_xlabel(
        "time in units of a stage's forward pass; its input and weight gradients take 1 each\n"
        "blue: forward; green: backward, or input gradient; orange: weight gradient; light: the second chunk"
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
