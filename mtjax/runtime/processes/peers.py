"""The processes of a run monitor each other: when one is lost, the others report it and end.

Each process sends a heartbeat (`Pulse`) to jax's coordination service, which runs in process 0. Process 0 reads them
all and publishes a verdict, which the others read: a beat costs each process three small messages, however many
processes there are. Timeouts use the reader's clock. Without this, jax takes longer to detect a lost process, and ends
with a C++ stack.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import NoReturn

import jax
from jax._src import distributed  # the coordinator's address has no public name

from mtjax.config import Parallel
from mtjax.errors import LOST, UserError, first_line
from mtjax.runtime.processes.coordination import all_gather_text, describe_process, num_processes, service, this_process
from mtjax.runtime.processes.native_stderr import NativeStderr
from mtjax.sharding.processes import START_TIMEOUT, several_expected, start_processes

PULSES, VERDICT = "mtjax/pulse/", "mtjax/verdict"
SILENCE = 0.6
"""Fraction of the timeout after which a silent process counts as lost: the remaining time is for notifying the
others."""
BEATS = 30
"""Beats per timeout."""


@dataclass(frozen=True)
class Pulse:
    """The heartbeat of a process."""

    count: int = 0
    """Increases with each beat."""
    where: str = "the start"
    step: int = 0
    overdue: bool = False
    """Whether its step takes far longer than earlier steps."""
    ended: str | None = None
    """Why the process ended; None while it runs."""
    code: int = LOST
    """Its exit code."""


@dataclass(frozen=True)
class PeerVerdict:
    """Process 0's evaluation of the heartbeats."""

    count: int = 0
    """Increases with each beat."""
    where: str = "the start"
    """Where process 0 is."""
    lost: tuple[tuple[int, str, int], ...] = ()
    """Lost processes, what happened to them, and the exit code for the others."""
    overdue_step: int = 0
    """The step that takes too long; every process writes its stacks once."""
    late: tuple[int, ...] = ()
    """Processes that have not reached that step."""


class HeartbeatMonitor:
    """When each process was last heard of. Used by process 0.

    Args:
      who: host and process id of each process.
      silence: seconds after which a process is lost.
    """

    def __init__(self, who: list[str], silence: float) -> None:
        self._who, self._silence = who, silence
        self._pulses: dict[int, Pulse] = {}
        self._heard: dict[int, float] = {}

    def verdict(self, pulses: dict[int, Pulse], now: float) -> PeerVerdict:
        """Evaluates the heartbeats in the service at time `now`, in seconds."""
        for process in range(len(self._who)):
            pulse = pulses.get(process, Pulse())
            # The count changes with each beat, so equal pulses are one beat that was read twice.
            if process not in self._heard or pulse != self._pulses[process]:
                self._pulses[process], self._heard[process] = pulse, now
        running = {process: pulse for process, pulse in self._pulses.items() if pulse.ended is None}
        ended = [(process, f"ended: {p.ended}", p.code) for process, p in self._pulses.items() if p.ended]
        silent = [
            (process, f"stopped responding at {pulse.where}", LOST)
            for process, pulse in running.items()
            if now - self._heard[process] > self._silence
        ]
        overdue = max((pulse.step for pulse in running.values() if pulse.overdue), default=0)
        late = [process for process, pulse in running.items() if pulse.step < overdue]
        here = self._pulses[0]
        # A process that reported its end is the cause; one that is silent may be ending because of it.
        return PeerVerdict(here.count, here.where, tuple(ended or silent), overdue, tuple(late))


class Peers:
    """Connects this process with the others of its run; use as a context manager around everything that they do
    together.

    Args:
      parallel: how the processes connect, and the timeout after which all end when one is lost.

    Attributes:
      count: number of processes.
      advice: command that resumes the run.
      at_end: called when this process leaves the others, for whatever reason.
      on_overdue: called once for each step that takes too long, with the step and the names of the processes that have
        not reached it.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._timeout, self._beat_seconds = parallel.peer_timeout, parallel.peer_timeout / BEATS
        self._me, self.count = 0, 1
        self.advice = "start the run again"
        self.at_end: Callable[[], object] = lambda: None
        self.on_overdue: Callable[[int, str], object] = lambda step, late: None
        self._who = [""]
        self._pulse, self._verdict, self._heard = Pulse(), PeerVerdict(), time.monotonic()
        self._service_lost, self._closed, self._beaten = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> "Peers":
        """Connects to the other processes.

        Raises:
          UserError: the settings or environment variables for connecting are invalid.
        """
        if not several_expected(self._parallel):
            return self
        # Before jax connects, whose client ends the process in C++ if that fails.
        self._stderr = NativeStderr(self._given_up)
        try:
            start_processes(self._parallel)
        except UserError:
            self._stderr.close()
            raise
        self._me, self.count = this_process(), num_processes()
        if self.count == 1:
            self._stderr.close()
        else:
            self._who = all_gather_text("the start of the run", describe_process())
            self._monitor, self._heard = HeartbeatMonitor(self._who, SILENCE * self._timeout), time.monotonic()
            for body in (self._beat, self._watch):
                threading.Thread(target=body, name=f"peers {body.__name__}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count > 1 and error is not None:
            self._leave(error)
        if self.count > 1:
            # Together: process 0 has the service, without which the others would end with an error.
            all_gather_text("the end of the run", "")
            self._closed.set()
            self._stderr.close()
        self.at_end()

    def _leave(self, error: BaseException) -> NoReturn:
        """Tells the others why this process ends, and ends it: jax's own shutdown would wait for them."""
        if not isinstance(error, UserError | KeyboardInterrupt):
            time.sleep(0.8 * self._timeout)  # if a lost process caused the error, `_watch` ends this one meanwhile
        self._stderr.flush()
        code = 2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        reason = "interrupted" if code == 130 else first_line(error, 1000)
        self._pulse = replace(self._pulse, ended=reason, code=code)
        # Waits until a beat with the reason was sent.
        self._beaten.clear()
        self._beaten.wait(self._timeout / 2)
        if code == 1:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            print(f"error: {error}" if code == 2 else reason, file=sys.stderr)
        self._exit(code)

    def _given_up(self) -> None:
        """Called when jax's client is about to abort this process."""
        if self.count == 1:
            coordinator = distributed.global_state.coordinator_address
            where = f" at {coordinator}" if coordinator else ""
            print(
                f"error: not all processes of this run connected{where} within {START_TIMEOUT} s: "
                "check that each is started and can reach the host of process 0",
                file=sys.stderr,
            )
            os._exit(LOST)
        self._service_lost.set()
        while True:
            time.sleep(1)  # `_watch` reports which process is lost, and ends this one

    def at(self, where: str, step: int = 0, *, overdue: bool = False) -> None:
        """Records where this process is: `step 12`."""
        self._pulse = Pulse(0, where, step, overdue)

    def _exit(self, code: int) -> NoReturn:
        with contextlib.suppress(Exception):
            self.at_end()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if self._me == 0:
            time.sleep(
                4 * self._beat_seconds
            )  # the service ends with this process: the others must read the verdict first
        os._exit(code)

    def _beat(self) -> None:
        """Sends this process's heartbeats and reads the verdicts. Blocks when the service does."""
        for count in itertools.count(1):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # `_watch` counts the seconds without a verdict
                pulse = replace(self._pulse, count=count)
                service().key_value_set(f"{PULSES}{self._me}", json.dumps(asdict(pulse)), allow_overwrite=True)
                if self._me == 0:
                    self._judge()
                verdict = PeerVerdict(**json.loads(service().key_value_try_get(VERDICT)))
                if verdict.count != self._verdict.count:
                    self._verdict, self._heard = verdict, time.monotonic()
                if pulse.ended is not None:
                    self._beaten.set()
            if self._closed.wait(self._beat_seconds):
                return

    def _judge(self) -> None:
        pulses = {
            int(key.removeprefix(PULSES)): Pulse(**json.loads(text))
            for key, text in service().key_value_dir_get(PULSES)
        }
        verdict = self._monitor.verdict(pulses, time.monotonic())
        service().key_value_set(VERDICT, json.dumps(asdict(verdict)), allow_overwrite=True)

    def _watch(self) -> None:
        """Ends this process when the verdict, or its absence, shows that another process is lost."""
        reported_step = 0
        while not self._closed.wait(self._beat_seconds / 2):
            verdict = self._verdict
            if self._pulse.ended is not None:
                return  # `_leave` ends this process
            lost = list(verdict.lost)
            if self._service_lost.is_set() or time.monotonic() - self._heard > SILENCE * self._timeout:
                lost = lost or [(0, f"stopped responding at {verdict.where}", LOST)]
            if lost:
                self._say_and_exit(lost)
            if verdict.overdue_step > reported_step:
                reported_step = verdict.overdue_step
                with contextlib.suppress(OSError):  # stacks are optional, and the disk may be the cause
                    self.on_overdue(reported_step, self._names(verdict.late))

    def _say_and_exit(self, lost: list[tuple[int, str, int]]) -> None:
        process, what, code = lost[0]
        others = f", and so did {len(lost) - 1} more" if lost[1:] else ""
        advice = f"; resume with: {self.advice}" if code == LOST else ""
        print(f"error: {self._names((process,))} {what}{others}{advice}", file=sys.stderr)
        self._exit(code)

    def _names(self, processes: tuple[int, ...]) -> str:
        named = [f"process {process} ({self._who[process]})" for process in processes[:3]]
        return ", ".join(named) + (f" and {len(processes) - 3} more" if processes[3:] else "")
