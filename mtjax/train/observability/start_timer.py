"""Where the time of one start of a run goes: every second belongs to exactly one activity."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtjax.waiting import Waiting

IMPORTS, PROCESSES, DEVICES, TEXT, MODEL, STATE, SCALES = (
    f"start-up/{what}" for what in ("imports", "processes", "devices", "text", "model", "state", "first scales")
)
ACTIVITIES = (START, COMPILATION, STEPS, DATA, SAVE, VALIDATION, REPLICAS, SUMMARY) = (
    *("start-up", "compilation", "steps", "waiting for data", "save", "validation", "check of replicas", "summary"),
)
NAMES = {
    PROCESSES: "waiting for the other processes of the run",
    DEVICES: "attaching the devices",
    TEXT: "preparing the data",
    MODEL: "building the model",
    STATE: "initializing or restoring the state",
    SCALES: "finding the first scales of 8-bit floats",
    STEPS: "compiling and running the first step",
    SAVE: "saving a checkpoint",
    VALIDATION: "validating",
    REPLICAS: "checking replicas",
    SUMMARY: "writing the summary",
}
"""Names of activities that may take seconds in which a run prints nothing else."""
COMPILES = "/jax/core/compile/"
"""Prefix of jax's events of tracing, lowering and compiling a program."""


class StartTimer:
    """Measures the activities of a start; the first is imports.

    Args:
      now: returns monotonic time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._doing, self._since = IMPORTS, now()
        self._compiling: list[tuple[float, float]] = []
        self._waiting: Waiting | None = None
        """Names the current activity on stderr, inside `watch_compiler`."""

    def begin(self, activity: str) -> None:
        """Ends the current activity, and begins another."""
        now = self._now()
        self._add(self._doing, now - self._since)
        self._doing, self._since = activity, now
        # Only events of one activity are nested in each other.
        self._compiling.clear()
        if self._waiting is not None:  # of the steps only the first one, which is compiled: others are logged
            self._waiting.begin(None if activity == STEPS and STEPS in self._seconds else NAMES.get(activity))

    def take(self, activity: str, seconds: float) -> None:
        """Moves seconds that have just passed from the current activity to another."""
        self._add(activity, seconds)
        self._add(self._doing, -seconds)

    @contextlib.contextmanager
    def waiting(self, results: Mapping[str, Any] | None) -> Iterator[None]:
        """Measures the wait for a batch; time in which the devices were idle, too, counts as waiting for data.

        Args:
          results: results of the last dispatched step; None if there was none. If they are ready before the wait, the
            devices are idle; if they become ready during it, half of the wait counts.
        """

        def busy() -> bool:
            return results is not None and not all(value.is_ready() for value in results.values())

        at_first, start = busy(), self._now()
        yield
        waited = self._now() - start
        # The moment at which the devices became idle is not known: half of the wait is the expected value.
        if not at_first or not busy():
            self.take(DATA, waited / 2 if at_first else waited)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each activity until now; phases of the start-up have names like "start-up/text"."""
        self.begin(self._doing)
        return dict(self._seconds)

    @contextlib.contextmanager
    def watch_compiler(self) -> Iterator[None]:
        """Counts the time that jax spends on compiling in this thread as compilation; names activities on stderr."""
        # Here, as this timer measures how long the import of jax takes.
        import jax

        self._waiting = Waiting()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        try:
            yield
        finally:
            self._waiting.begin(None)
            self._waiting = None
            jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        # Other threads compile while this one does something else, which is counted.
        if not event.startswith(COMPILES) or threading.current_thread() is not threading.main_thread():
            return
        end = self._now()
        # Events report their end and duration; what was counted before `begin` belongs to another activity.
        start, inner = max(end - duration_secs, self._since), 0.0
        while (
            self._compiling and self._compiling[-1][0] >= start
        ):  # events can nest: a function is traced inside another
            first, last = self._compiling.pop()
            inner += last - first
        self._compiling.append((start, end))
        self.take(COMPILATION, end - start - inner)

    def _add(self, activity: str, seconds: float) -> None:
        self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds


def by_activity(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sums the phases of each activity, in the order of `ACTIVITIES`."""
    totals = dict.fromkeys(ACTIVITIES, 0.0)
    for name, value in seconds.items():
        totals[name.partition("/")[0]] += value
    return totals


def largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sorts activities by their seconds, descending."""
    return sorted(seconds.items(), key=lambda item: -item[1])
