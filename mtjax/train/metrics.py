"""What a run reports: rates from step times, and `metrics.jsonl`, TensorBoard events and a plot in its folder."""

import contextlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from mtjax.config import Config
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.flops import model_flops
from mtjax.theory.hardware import by_device_kind

CONVENTION = "model FLOPs: attention counted in full, recompute not at all"


@dataclass(frozen=True)
class Rates:
    """Turns seconds into rates.

    Attributes:
      flops_per_token: model FLOPs of training one token.
      devices: how many share the work.
      peak: dense FLOP/s of one device in the compute type, None when unknown.
    """

    flops_per_token: float
    devices: int
    peak: float | None

    @classmethod
    def of(cls, config: Config, devices: list[Any]) -> "Rates":
        """The rates of a run on these devices."""
        gpu = by_device_kind(devices[0].device_kind)
        peak = gpu.peak_flops(config.training.compute_dtype) if gpu else None
        flops = model_flops(anatomy_of(config.model)) / config.model.sequence_length
        return cls(flops, len(devices), peak)

    def tflops(self, tokens_per_second: float) -> float:
        """Model TFLOP/s of one device."""
        return tokens_per_second * self.flops_per_token / self.devices / 1e12

    def mfu(self, tokens_per_second: float) -> float | None:
        """Share of a device's peak that model FLOPs take; None when the peak is unknown."""
        return self.tflops(tokens_per_second) * 1e12 / self.peak if self.peak else None


def device_memory() -> tuple[int, int] | None:
    """Peak bytes in use and bytes in total on the fullest device of this process; None where they are unknown."""
    stats = [d.memory_stats() for d in jax.local_devices()]
    pairs = [(s["peak_bytes_in_use"], s["bytes_limit"]) for s in stats if s and "bytes_limit" in s]
    return max(pairs) if pairs else None


class MetricsLog:
    """`metrics.jsonl`, one object per logged step, and the same numbers as TensorBoard events.

    Args:
      folder: of the run.
      from_step: entries past this step, left by a run that got further than its last checkpoint, are dropped.
    """

    def __init__(self, folder: Path, from_step: int) -> None:
        self.path = folder / "metrics.jsonl"
        kept = [entry for entry in read_metrics(self.path) if entry["step"] <= from_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        temporary.replace(self.path)
        self._lines = self.path.open("a")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1)

    def write(self, entry: dict[str, Any]) -> None:
        """Appends one entry; it is on disk when this returns. NaN and infinity become null: JSON has neither."""
        finite = {name: value for name, value in entry.items() if math.isfinite(value)}
        self._lines.write(json.dumps(dict.fromkeys(entry) | finite) + "\n")
        self._lines.flush()
        for name, value in finite.items():
            if name != "step":
                self._events.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Writes what is still buffered."""
        self._lines.close()
        self._events.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a `metrics.jsonl`, null as NaN; a last line that a kill cut short is left out."""
    entries = []
    with contextlib.suppress(FileNotFoundError), path.open() as lines:
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                entries.append({k: math.nan if v is None else v for k, v in json.loads(line).items()})
    return entries


def plot_losses(metrics: Path, image: Path) -> None:
    """Draws the losses of a `metrics.jsonl` over the steps."""
    from matplotlib.figure import Figure  # half a second to import: not before the first step

    entries = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([e["step"] for e in entries], [e["loss"] for e in entries], label="training", linewidth=1)
    valid = [e for e in entries if "valid_loss" in e]
    if valid:
        axes.plot([e["step"] for e in valid], [e["valid_loss"] for e in valid], "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=image.parent.name)
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = image.with_name(f".{image.name}")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(image)
