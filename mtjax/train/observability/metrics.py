"""Metrics of a run: rates computed from step times, and `metrics.jsonl`, TensorBoard events and a plot in its
folder."""

import contextlib
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import parameters
from mtjax.analysis.flops import model_flops
from mtjax.analysis.hardware import by_device_kind
from mtjax.config import Config
from mtjax.train.folder.log_files import Events, Lines
from mtjax.train.observability.trackers import Tracking

LARGEST = 1e300
"""Numbers of this size and above are not plotted: the axes could not be scaled."""

TIME = "time/"
"""Prefix of the names of time totals."""

FEW_POINTS = 10
"""Logged losses below which a plot shows all of them."""

CONVENTION = "model FLOPs: attention counted in full, recompute not at all"


@dataclass(frozen=True)
class Rates:
    """Converts tokens per second to TFLOP/s and MFU.

    Attributes:
      flops_per_token: model FLOPs of training one token.
      devices: number of devices.
      peak: dense FLOP/s of one device in the compute type, None when unknown.
      are_shown: whether TFLOP/s are of interest; on virtual CPU devices, which share cores, they are not.
    """

    flops_per_token: float
    devices: int
    peak: float | None
    are_shown: bool = True

    @classmethod
    def of(cls, config: Config, devices: list[Any]) -> "Rates":
        """Builds the rates of a run on these devices."""
        gpu = by_device_kind(devices[0].device_kind)
        peak = gpu.peak_flops(config.training.compute_dtype) if gpu else None
        flops = model_flops(anatomy_of(config.model)) / config.model.sequence_length
        return cls(flops, len(devices), peak, devices[0].platform != "cpu")

    def tflops(self, tokens_per_second: float) -> float:
        """Returns the model TFLOP/s per device."""
        return tokens_per_second * self.flops_per_token / self.devices / 1e12

    def mfu(self, tokens_per_second: float) -> float | None:
        """Returns the model FLOPs utilization (MFU); None if the peak is unknown."""
        return self.tflops(tokens_per_second) * 1e12 / self.peak if self.peak else None


def device_memory() -> tuple[int, int] | None:
    """Returns peak bytes in use and the limit of the device of this process with the highest peak; None if unknown."""
    stats = [d.memory_stats() for d in jax.local_devices()]
    pairs = [(s["peak_bytes_in_use"], s["bytes_limit"]) for s in stats if s and "bytes_limit" in s]
    return max(pairs) if pairs else None


class MetricsLog:
    """Writes `metrics.jsonl`, one object per logged step, and the same numbers as TensorBoard events.

    Args:
      folder: of the run.
      from_step: entries after this step, left by a run that got further than its last checkpoint, are dropped; if it
        is 0, the file of an earlier start is renamed.
      tracker: receives the same numbers.
    """

    def __init__(self, folder: Path, from_step: int, tracker: Tracking | None = None) -> None:
        self.path = folder / "metrics.jsonl"
        self.renamed_to: Path | None = None
        """New path of an earlier start's file, if this one begins at step 0."""
        if from_step == 0:
            self.renamed_to = _rename_existing(self.path)
        # Rewritten, not appended to: a plot would show steps that are trained again twice.
        entries = [entry for entry in read_metrics(self.path) if entry["step"] <= from_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(_line(entry) for entry in entries))
        temporary.replace(self.path)
        self._lines, self._tracker = Lines(self.path), tracker
        self._events = Events(folder / "tensorboard", from_step + 1)

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one entry; it is on disk when this returns, or waits until the disk accepts it.

        NaN and infinity become null: JSON has neither.
        """
        self._lines.write(_line(entry))
        for name, value in entry.items():
            if name != "step" and is_number(value) and math.isfinite(value):
                self._events.add_scalar(name, value, entry["step"])
        if self._tracker is not None:
            self._tracker.log({name: value for name, value in entry.items() if is_number(value)})

    def close(self) -> None:
        """Writes entries that are still waiting.

        Raises:
          UserError: it can't be written.
        """
        self._events.close()
        if self._tracker is not None:
            self._tracker.close()
        self._lines.close()


def is_number(value: Any) -> bool:
    """Returns whether a value of an entry is a single number."""
    # Not isinstance: a bool is an int to Python.
    return type(value) in (int, float)


def _line(entry: dict[str, Any]) -> str:
    def plain(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps({name: plain(value) for name, value in entry.items()}) + "\n"


def _rename_existing(path: Path) -> Path | None:
    """Renames a file that is not empty, with the first free number; returns its new path."""
    if not path.exists() or not path.stat().st_size:
        return None
    names = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads the entries of a `metrics.jsonl`, with null as NaN; skips invalid lines, such as one that was cut off by a
    kill."""
    entries = []
    # A line that was cut off may end within a character.
    with contextlib.suppress(FileNotFoundError), path.open(errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict) and type(entry.get("step")) is int:
                    entries.append({k: math.nan if v is None else v for k, v in entry.items()})
    return entries


def _curve(entries: list[dict[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the entries that have a number under a name."""
    points = [(e["step"], e[name]) for e in entries if is_number(e.get(name))]
    points = [(float(step), float(value)) for step, value in points if max(abs(step), abs(value)) < LARGEST]
    return [step for step, _ in points], [value for _, value in points]


def main_results(names: Iterable[str]) -> list[str]:
    """Returns the first of each task's metrics, called `TASK/RESULT`: its main result."""
    of_tasks = [name for name in names if "/" in name and not name.startswith(TIME)]
    # Reversed, so that the first name of a task is assigned last, and stays.
    firsts = {name.partition("/")[0]: name for name in reversed(of_tasks)}
    return list(reversed(firsts.values()))


def plot_losses(metrics: Path, image: Path, config: Config | None = None) -> None:
    """Plots the losses of a `metrics.jsonl` by step, and below them the results of evaluation tasks, one panel per
    task; the title names what `config` trains."""
    from matplotlib.figure import Figure  # takes half a second to import: only after the last step

    entries = read_metrics(metrics)
    results = main_results(dict.fromkeys(name for entry in entries for name in entry))
    figure = Figure(figsize=(8, 4.5 + 2.2 * len(results)), layout="constrained")
    heights = [4.5, *[2.2] * len(results)]
    axes, *panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, name in zip(panels, results, strict=True):
        panel.plot(*_curve(entries, name), "o-")
        panel.set(ylabel=name.replace("/", "\n"))
        panel.grid(alpha=0.3)
    axes.plot(*_curve(entries, "loss"), label="training", linewidth=1)
    steps, losses = _curve(entries, "valid_loss")
    if steps:
        axes.plot(steps, losses, "o-", label="validation")
    axes.set(ylabel="loss", title=image.parent.name + (f": {_title(config)}" if config else ""))
    _cut_off_the_start(axes, _curve(entries, "loss"), losses)
    figure.axes[-1].set(xlabel="step")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = image.with_name(f".{image.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(image)


def _title(config: Config) -> str:
    model, batch = config.model, config.training.global_batch_size
    return (
        f"{model.family}, {parameters(anatomy_of(model)) / 1e6:,.1f}M parameters, mesh {config.parallel.mesh}, "
        f"{batch} x {model.sequence_length} tokens a step"
    )


def _cut_off_the_start(axes: Any, curve: tuple[list[float], list[float]], others: list[float]) -> None:
    """Limits a loss axis to the losses after the first twentieth of the steps; those before would squeeze them."""
    steps, losses = curve
    if len(losses) < FEW_POINTS:
        return
    begin = steps[0] + (steps[-1] - steps[0]) / 20
    later = [loss for step, loss in zip(steps, losses, strict=True) if step > begin]
    least, most = min([*later, *others]), max([*later, *others])
    margin = (most - least) / 20
    # Equal losses have no range to show.
    if margin > 0:
        axes.set_ylim(least - margin, most + margin)
