"""Where the time of a run went, over all of its starts: productive steps, overhead, and lost time.

Whenever it logs or saves, each start appends to `time.jsonl` in the run's folder how its time was spent so far. The
next start computes from this the cost of a crash: steps after the checkpoint from which it resumed are repeated, and
the time between the last line of a crashed start and the next start was downtime.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.train.observability.metrics import TIME
from mtjax.train.observability.start_timer import (
    ACTIVITIES,
    DATA,
    REPLICAS,
    SAVE,
    STEPS,
    VALIDATION,
    StartTimer,
    by_activity,
    largest_first,
)

FILE, PICTURE = "time.jsonl", "goodput.png"
AGAIN, DOWN = "done again", "down"
LOST = (AGAIN, DOWN)
WORK = (STEPS, DATA, SAVE, VALIDATION)
"""Activities after the last checkpoint that the next start repeats."""
BINS = 160
"""Columns of the plot."""


@dataclass(frozen=True)
class TimeRecord:
    """A line of `time.jsonl`: how a start's time was spent so far."""

    start: float
    """Wall-clock time in seconds when the start began."""
    from_step: int
    """The step from which it resumed."""
    step: int
    """Steps done."""
    at: float
    """Wall-clock time of the line."""
    seconds: Mapping[str, float]
    """Seconds by activity since the start began."""
    ended: bool = False
    """Whether the start ended normally here: done, or requested to stop."""


@dataclass
class Span:
    """A span of a run's time."""

    step: int
    """Steps done at its end."""
    seconds: dict[str, float]
    """Seconds by activity."""


def read_lines(path: Path) -> list[TimeRecord]:
    """Reads the lines of a `time.jsonl`, without invalid ones."""
    lines = []
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as file:
        for text in file:
            # A start that is killed may leave a line that is cut off.
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                line = TimeRecord(**json.loads(text))
                numbers = (line.start, line.from_step, line.step, line.at, *line.seconds.values())
                if all(isinstance(n, int | float) and np.isfinite(n) for n in numbers):
                    lines.append(line)
    return lines


def spans(lines: Iterable[TimeRecord], next_start: tuple[float, int] | None = None) -> list[Span]:
    """Returns a run's time in order, including lost time.

    Args:
      lines: of all starts so far.
      next_start: when another start began, and from which step.
    """
    result: list[Span] = []
    before: TimeRecord | None = None
    for line in lines:
        is_first = before is None or line.start != before.start
        if is_first:
            _count_lost(result, before, line.start, line.from_step)
        # A line has the seconds since its start began; a span has those since the line before.
        known = {} if is_first or before is None else before.seconds
        result.append(Span(line.step, {name: s - known.get(name, 0.0) for name, s in line.seconds.items()}))
        before = line
    if next_start is not None:
        _count_lost(result, before, *next_start)
    return result


def _count_lost(result: list[Span], before: TimeRecord | None, start: float, from_step: int) -> None:
    """Counts as lost the work that the following start repeats, and the time until it."""
    # Whole spans: a line is written with each save, so a checkpoint is at a span's end.
    for span in (span for span in result if span.step > from_step):
        lost = sum(span.seconds.pop(name, 0.0) for name in WORK)
        span.seconds[AGAIN] = span.seconds.get(AGAIN, 0.0) + lost
    # The time until the next start is down time only after a crash.
    if before is not None and not before.ended:
        result.append(Span(from_step, {DOWN: max(0.0, start - before.at)}))


def totals(of: Iterable[Span]) -> dict[str, float]:
    """Sums the seconds of each activity."""
    spent = dict.fromkeys((*ACTIVITIES, *LOST), 0.0)
    for span in of:
        for name, seconds in span.seconds.items():
            if name in spent:
                spent[name] += seconds
    return spent


class TimeLog:
    """The time log of this start, added to those of the run's earlier starts in its folder.

    Args:
      folder: of the run.
      from_step: the step from which this start resumes.
      times: of this start.
      now: the time of day, in seconds.
    """

    def __init__(self, folder: Path, from_step: int, times: StartTimer, now: Callable[[], float] = time.time) -> None:
        self._path, self._times, self._now, self._from_step = folder / FILE, times, now, from_step
        # From the process's start: imports and waiting for other processes count.
        self._start = round(now() - sum(times.seconds().values()), 3)
        earlier = read_lines(self._path)
        self.starts = 1 + len({line.start for line in earlier})
        self._after_cut = self._path.exists()  # its last line may be cut off: start on a new line
        self._earlier = totals(spans(earlier, (self._start, from_step)))
        self.write(from_step)

    def write(self, step: int, *, ended: bool = False) -> None:
        """Appends how the time was spent until this step."""
        seconds = {name: round(s, 3) for name, s in by_activity(self._times.seconds()).items()}
        line = TimeRecord(self._start, self._from_step, step, round(self._now(), 3), seconds, ended)
        try:
            with self._path.open("a") as file:
                file.write("\n" * self._after_cut + json.dumps(vars(line)) + "\n")
            self._after_cut = False
        except OSError:  # a full disk: the next line contains these times, too
            self._after_cut = True

    def totals(self) -> dict[str, float]:
        """Sums the seconds of each activity, and of lost time, over all starts."""
        now = by_activity(self._times.seconds())
        return {name: seconds + now.get(name, 0.0) for name, seconds in self._earlier.items()}

    def metrics(self) -> dict[str, float]:
        """Returns the totals by their names in `metrics.jsonl`, and the goodput: the fraction of time in steps that
        were not lost."""
        spent = self.totals()
        named = {f"{TIME}{name.replace(' ', '_')}": round(seconds, 3) for name, seconds in spent.items()}
        return {"goodput": goodput(spent)} | named

    def describe(self) -> str:
        """Describes the totals, largest first, and the phases of this start's start-up."""
        spent, parts = self.totals(), self._times.seconds()
        total = sum(spent.values())
        shares = [f"{name} {value / total:.0%}" for name, value in largest_first(spent) if value >= 0.005 * total]
        start = ", ".join(f"{n.partition('/')[2]} {s:.1f}" for n, s in parts.items() if "/" in n and s >= 0.05)
        starts = f" in {self.starts} starts" if self.starts > 1 else ""
        return f"{total:.0f} s{starts}: {', '.join(shares)}" + (f" (start-up: {start} s)" if start else "")

    def plot(self) -> None:
        """Plots `goodput.png`."""
        plot(spans(read_lines(self._path)), self._path.with_name(PICTURE))


def goodput(spent: Mapping[str, float]) -> float:
    """Returns the fraction of a run's time in steps that were not repeated; 0 before the first step."""
    total = sum(spent.values())
    return spent[STEPS] / total if total > 0 else 0.0


COLOURS = {
    STEPS: "#2a7f62",
    VALIDATION: "#8fc1a9",
    SAVE: "#3d6fb4",
    DATA: "#e0a100",
    REPLICAS: "#7fb3c8",
    "compilation": "#8e7cc3",
    "start-up": "#b8b0d0",
    "summary": "#d9d9d9",
    AGAIN: "#c8553d",
    DOWN: "#4a4a4a",
}


def plot(of: list[Span], image: Path) -> None:
    """Plots how a run's time was spent, over time and in total."""
    from matplotlib.figure import Figure  # takes half a second to import: only after the last step

    spent = totals(of)
    total = max(sum(spent.values()), 1e-9)
    unit, size = ("hours", 3600.0) if total > 7200 else ("minutes", 60.0) if total > 120 else ("seconds", 1.0)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    over_time, in_all = figure.subplots(2, height_ratios=[1, 1.3])
    columns, edges = in_columns(of, total), np.linspace(0.0, total / size, BINS + 1)
    steps = [np.repeat(columns[name], 2) for name in COLOURS]
    over_time.stackplot(np.repeat(edges, 2)[1:-1], steps, colors=list(COLOURS.values()))
    over_time.set(xlabel=f"{unit} of the run", ylabel="share", xlim=(0, total / size), ylim=(0, 1))
    shown = [name for name in COLOURS if spent[name] > 0]
    bars = in_all.barh(shown, [spent[name] / size for name in shown], color=[COLOURS[name] for name in shown])
    in_all.bar_label(bars, [f" {spent[name] / total:.1%}" for name in shown])
    in_all.invert_yaxis()
    in_all.margins(x=0.12)
    in_all.set(xlabel=unit)
    over_time.set_title(f"{image.parent.name}: goodput {goodput(spent):.1%}")
    temporary = image.with_name(f".{image.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(image)


def in_columns(of: list[Span], total: float) -> dict[str, Any]:
    """Returns the fraction of each activity in each of `BINS` equal intervals of the run's time, [BINS]."""
    columns = {name: np.zeros(BINS) for name in COLOURS}
    edges, at = np.linspace(0.0, total, BINS + 1), 0.0
    for span in of:
        length = sum(span.seconds.values())
        if length <= 0:
            continue
        # The columns in which the span begins and ends.
        first, last = np.searchsorted(edges, (at, at + length), "right") - 1
        within = slice(max(first, 0), min(last, BINS - 1) + 1)
        overlap = np.minimum(edges[1:][within], at + length) - np.maximum(edges[:-1][within], at)
        for name, seconds in span.seconds.items():
            if name in columns:
                columns[name][within] += np.maximum(overlap, 0) * seconds / length / (total / BINS)
        at += length
    return columns
