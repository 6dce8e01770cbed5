"""SIGTERM, SIGHUP and Ctrl-C end a run after its next step, the same step in all processes."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


def requests() -> list[signal.Signals]:
    """The signals that ask a run to stop. Under `nohup` SIGHUP does not: it is ignored from the start, and stays so."""
    is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if is_kept else [signal.SIGHUP])


class StopRequest:
    """Watches for a request to stop; use as a context manager.

    In one process it handles the signals itself. With several, jax's coordination service catches SIGTERM and makes all
    of them agree on the step; the others are passed on as SIGTERM. A second Ctrl-C is `mtjax.interrupt`'s.
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
            os.kill(os.getpid(), signal.SIGTERM)
        self._signal = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    def at(self, step: int) -> str | None:
        """The name of what asked the run to stop after this step; None if nothing did."""
        if self._together:
            return "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
        return self._signal
