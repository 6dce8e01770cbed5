"""Where the time of one start of a run goes: every second since it began belongs to exactly one activity."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

IMPORTS, PROCESSES, DEVICES, TEXT, MODEL, STATE = (
    f"start-up/{what}" for what in ("imports", "processes", "devices", "text", "model", "state")
)
ACTIVITIES = (START, COMPILATION, STEPS, DATA, SAVE, VALIDATION, REPLICAS, SUMMARY) = (
    *("start-up", "compilation", "steps", "waiting for data", "save", "validation", "check of replicas", "summary"),
)
COMPILES = "/jax/core/compile/"
"""What jax's events of tracing, lowering and compiling a program begin with."""


class StartTimer:
    """A clock that says what a start of a run is doing; it begins with imports.

    Args:
      now: seconds, from any moment on.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._doing, self._since = IMPORTS, now()
        self._compiling: list[tuple[float, float]] = []

    def begin(self, activity: str) -> None:
        """Ends what went on so far, and begins something else."""
        now = self._now()
        self._add(self._doing, now - self._since)
        self._doing, self._since = activity, now
        self._compiling.clear()

    @contextlib.contextmanager
    def spend(self, activity: str) -> Iterator[None]:
        """Within it, time goes into `activity`; then what went on before goes on."""
        before = self._doing
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    def take(self, activity: str, seconds: float) -> None:
        """Moves seconds that have just passed from what is going on to another activity."""
        self._add(activity, seconds)
        self._add(self._doing, -seconds)

    @contextlib.contextmanager
    def waiting(self, results: Mapping[str, Any] | None) -> Iterator[None]:
        """Within it the host waits for a batch; what the devices waited meanwhile, too, goes into waiting for data.

        Args:
          results: of the last step that the devices were given; None when there was none. If they are there before the
            wait, the devices have nothing to do; if they come during it, half of the wait counts.
        """

        def busy() -> bool:
            return results is not None and not all(value.is_ready() for value in results.values())

        at_first, start = busy(), self._now()
        yield
        waited = self._now() - start
        if not at_first or not busy():
            self.take(DATA, waited / 2 if at_first else waited)

    def seconds(self) -> dict[str, float]:
        """Seconds of each activity until now; the parts of the start-up by names like "start-up/text"."""
        self.begin(self._doing)
        return dict(self._seconds)

    @contextlib.contextmanager
    def watch_compiler(self) -> Iterator[None]:
        """Within it, what jax spends on programs in this thread goes into compilation."""
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if not event.startswith(COMPILES) or threading.current_thread() is not threading.main_thread():
            return
        end = self._now()
        start, inner = max(end - duration_secs, self._since), 0.0
        while self._compiling and self._compiling[-1][0] >= start:  # a function is traced while another one is
            first, last = self._compiling.pop()
            inner += last - first
        self._compiling.append((start, end))
        self.take(COMPILATION, end - start - inner)

    def _add(self, activity: str, seconds: float) -> None:
        self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds


def by_activity(seconds: Mapping[str, float]) -> dict[str, float]:
    """The same with the parts of an activity together, in the order of `ACTIVITIES`."""
    whole = dict.fromkeys(ACTIVITIES, 0.0)
    for name, value in seconds.items():
        whole[name.partition("/")[0]] += value
    return whole


def largest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """Activities and their seconds."""
    return sorted(seconds.items(), key=lambda item: -item[1])
