"""Measures step times, and records what every process is doing when a step takes far too long."""

import faulthandler
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from mtjax.runtime.processes.coordination import this_process
from mtjax.runtime.processes.peers import Peers
from mtjax.train.observability.start_timer import STEPS, StartTimer

FACTOR = 10
"""A step takes too long if it takes this many times the median."""
SHORTEST = 60.0
"""Minimum of the limit in seconds: on a busy machine, short steps may be delayed by more than the factor."""
LOOK = 0.5
"""Seconds between checks of the step in flight."""
LAPS = 100
"""Number of recent measurements in the median."""


class StepClock:
    """Measures steps, and monitors the one in flight; use as a context manager around the steps.

    The host runs ahead of the devices, so it only knows the total time of all steps since the last lap. The first lap,
    which includes compilation, is monitored only if a limit is set.

    Args:
      step: the last step done.
      folder: of the run; stacks go to its `stacks`.
      limit: seconds that a step may take; `FACTOR` times the median when None.
      peers: informed where this process is.
      say: called once for each step that takes too long, with a sentence.
      times: informed of the current activity.
    """

    def __init__(
        self,
        step: int,
        folder: Path,
        limit: float | None,
        peers: Peers,
        say: Callable[[str], object],
        times: StartTimer | None = None,
    ) -> None:
        self._folder, self._limit, self._peers, self._say = folder / "stacks", limit, peers, say
        self._times = times or StartTimer()
        # The newest: a ramp of the batch size makes steps longer for good.
        self._laps: deque[float] = deque(maxlen=LAPS)
        self._lap_step = self._step = self._reported_step = step
        self._since = time.perf_counter()
        self._watched, self._compiled, self._closed = False, False, threading.Event()

    def __enter__(self) -> "StepClock":
        self._times.begin(STEPS)
        self._peers.on_overdue = self.write_stacks
        threading.Thread(target=self._watch, name="step clock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def begin(self, step: int) -> None:
        """Records that a step is dispatched to the devices."""
        self._step, self._watched = step, True
        self._peers.at(f"step {step}", step)

    def lap(self, step: int) -> float:
        """Returns the mean seconds of the steps since the last lap or restart, which the devices have completed."""
        seconds = (time.perf_counter() - self._since) / (step - self._lap_step)
        # The first lap includes compilation, and would raise the median.
        if self._compiled:
            self._laps.append(seconds)
        self._compiled = True
        self.restart(step)
        return seconds

    def pause(self, what: str) -> None:
        """Records that another activity, such as a save, begins; it has no time limit."""
        self._watched = False
        self._times.begin(what)
        self._peers.at(f"the {what} after step {self._step}", self._step)

    def restart(self, step: int) -> None:
        """Excludes the time since the last lap."""
        self._times.begin(STEPS)
        self._lap_step, self._since = step, time.perf_counter()

    def allowed(self) -> float | None:
        """Returns the seconds after the last lap at which the step in flight takes too long; None before there is a
        median."""
        median = statistics.median(self._laps) if self._laps else None
        if self._limit is None and median is None:
            return None
        # The host runs ahead: steps between the last lap and the one in flight may take their time, too.
        before = max(0, self._step - self._lap_step - 1) * (median or 0)
        return before + (self._limit or max(SHORTEST, FACTOR * (median or 0)))

    def _watch(self) -> None:
        while not self._closed.wait(LOOK):
            allowed = self.allowed()
            step = self._step
            if not self._watched or allowed is None or time.perf_counter() - self._since < allowed:
                continue
            # With several processes the coordinator decides, which knows who is late; it calls `write_stacks` in all of
            # them.
            if self._peers.count > 1:
                self._peers.at(f"step {step}", step, overdue=True)
            elif step > self._reported_step:
                self.write_stacks(step, "")

    def write_stacks(self, step: int, late: str) -> None:
        """Writes the stack of each thread of this process; the first process reports which processes are late."""
        self._reported_step = step
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step}-process-{this_process()}.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        who = f"; {late} did not reach it" if late else ""
        self._say(f"note    step {step} takes far longer than earlier steps{who}: Python stacks are in {self._folder}")
