"""Progress of a run on the terminal: one live line, or plain lines without a terminal."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from mtjax.train.observability.expert_load import describe_load
from mtjax.train.observability.metrics import Rates, device_memory, main_results

SCORES = ("accuracy", "f1", "pearson")
"""Validation metrics of tasks in addition to the loss, without `valid_`."""


class ProgressLine:
    """Shows a run's progress; prints nothing in processes other than the first.

    Use as a context manager.
    """

    def __init__(self, steps: int, rates: Rates, *, first_process: bool) -> None:
        self.steps, self.rates = steps, rates
        self.live = sys.stdout.isatty() and first_process
        # Without a terminal rich would break lines at 80 columns.
        self.console = Console(highlight=False, quiet=not first_process, width=None if sys.stdout.isatty() else 180)
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=self.console,
            disable=not self.live,
        )
        self._task = self._bar.add_task("compiling", total=steps)

    def __enter__(self) -> "ProgressLine":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a permanent line."""
        self.console.print(text, markup=False, soft_wrap=True)

    def update(self, entry: dict[str, Any], *, compiled: bool = False) -> None:
        """Shows a logged step; without a speed if its time includes compilation (`compiled`)."""
        if compiled:
            text = f"{_losses(entry)}  compiled and run in {entry['step_time']:.0f} s"
        else:
            text = f"{_losses(entry)}  {_speed(entry, self.rates, self.steps)}"
        if self.live:
            self._bar.update(self._task, completed=entry["step"], description=text)
        if not self.live or "valid_loss" in entry or main_results(entry):
            self.say(f"step {entry['step']:>{len(str(self.steps))}}/{self.steps}  {text}")

    def advance(self, step: int) -> None:
        """Advances the progress bar."""
        self._bar.update(self._task, completed=step)


def _losses(entry: dict[str, Any]) -> str:
    parts = [f"loss {entry['loss']:.4f}"]
    if "valid_loss" in entry:
        parts.append(f"valid {entry['valid_loss']:.4f}")
    parts += [f"{name} {entry[f'valid_{name}']:.4f}" for name in SCORES if f"valid_{name}" in entry]
    parts += [f"{name.replace('/', ' ')} {entry[name]:.4f}" for name in main_results(entry)]
    parts += [load] if (load := describe_load(entry)) else []
    if entry["skipped"]:
        parts[0] += " (skipped)"
    if "loss_scale" in entry:
        parts.append(f"scale {entry['loss_scale']:g}")
    return "  ".join([*parts, f"grad {entry['grad_norm']:.3f}", f"lr {entry['learning_rate']:.2e}"])


def _speed(entry: dict[str, Any], rates: Rates, steps: int) -> str:
    speed = entry["tokens_per_second"]
    parts = [f"{_short(speed)} tokens/s"]
    if rates.are_shown:
        parts.append(f"{rates.tflops(speed):.3g} TFLOP/s/device")
    mfu = rates.mfu(speed)
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
    memory = device_memory()
    if memory is not None:
        parts.append(f"{memory[0] / 1e9:.1f} of {memory[1] / 1e9:.0f} GB")
    return "  ".join([*parts, f"ETA {clock((steps - entry['step']) * entry['step_time'])}"])


def clock(seconds: float) -> str:
    """Formats seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
