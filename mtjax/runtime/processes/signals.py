"""SIGTERM, SIGHUP and Ctrl-C end a run after its current step, the same step in all processes."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


def requests() -> list[signal.Signals]:
    """Returns the signals that request a stop. SIGHUP is excluded if it is ignored from the start, as under `nohup`."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if is_kept else [signal.SIGHUP])


class StopRequest:
    """Handles requests to stop; use as a context manager.

    A single process handles the signals itself. With several, jax's coordination service catches SIGTERM and makes all
    processes agree on a step; other signals are forwarded as SIGTERM. A second Ctrl-C is handled by `mtjax.interrupt`.
    """

    def __init__(self) -> None:
        self._signal: str | None = None
        self._together = jax.process_count() > 1

    def __enter__(self) -> "StopRequest":
        numbers = [number for number in requests() if not (self._together and number == signal.SIGTERM)]
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._together:
            # jax's handler of SIGTERM makes the processes agree on a step.
            os.kill(os.getpid(), signal.SIGTERM)
        self._signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    def at(self, step: int) -> str | None:
        """Returns the name of the signal that requests a stop after this step; None if there is none."""
        if self._together:
            return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
        return self._signal
