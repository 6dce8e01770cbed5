"""Several processes of one run on this machine: how many it takes, and how they start, speak and end together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.sharding.mesh import MAX_CPU_DEVICES, has_gpu
from mtjax.sharding.processes import several_expected
from mtjax.theory.mesh import AUTO, parse_mesh
from mtjax.train.processes.signals import requests

MAX_PROCESSES = 64
"""Processes that one machine is asked for: each takes some 300 MB before it has a model."""
GRACE = 15.0
"""Seconds beyond the peers' time-out that processes have to end once one has failed."""


def processes_needed(config: Config, environment: Mapping[str, str]) -> int:
    """How many processes this one has to start for the run's virtual CPU devices; 1 when it can hold them itself.

    Raises:
      UserError: the mesh can't be read, takes too many, or mtjax can't train over one of its axes yet.
    """
    if config.parallel.mesh == AUTO:
        return 1
    shape = parse_mesh(config.parallel.mesh)
    size = shape.size
    if size <= MAX_CPU_DEVICES or several_expected(config.parallel, environment) or has_gpu():
        return 1
    for count in range(2, MAX_PROCESSES + 1):
        if size % count == 0 and size // count <= MAX_CPU_DEVICES:
            return count
    raise UserError(
        f"mesh {shape} has {size} devices, which up to {MAX_PROCESSES} processes of at most {MAX_CPU_DEVICES} virtual "
        f"CPU devices can't share: choose another mesh, or only look at the program: mtjax inspect --mesh {shape}"
    )


def member_arguments(arguments: Sequence[str], count: int) -> list[list[str]]:
    """The arguments of `mtjax train` for each of `count` processes that find each other on this machine."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    place = ["--coordinator", coordinator, "--num-processes", str(count), "--process-id"]
    return [[*arguments, *place, str(number)] for number in range(count)]


@dataclass(frozen=True)
class Member:
    """A process to start."""

    arguments: Sequence[str]
    """Of `mtjax train`."""
    prefix: str = ""
    """Before each line that it prints."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What differs from this process'."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended."""

    codes: Sequence[int]
    """Of each process; minus its number where it was a signal."""
    requested: bool
    """Whether this process was asked to end them."""

    @property
    def code(self) -> int:
        """Of all together: 2 where the input was wrong, else the first process' that failed, as a shell says it."""
        failed = [code for code in self.codes if code]
        first = 2 if 2 in failed else next(iter(failed), 0)
        return first if first >= 0 else 128 - first


def run_members(members: Sequence[Member], peer_timeout: float) -> Ended:
    """Runs processes until all have ended; once one has failed, those that don't follow are killed.

    What asks a run to stop is passed on to each.
    """
    processes = [_start(member) for member in members]
    asked: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in requests()}
    voices = [_speak(process, member.prefix) for process, member in zip(processes, members, strict=True)]
    try:
        _wait(processes, peer_timeout + GRACE)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with what it started, which would hold its pipes open
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for voice in (voice for pair in voices for voice in pair):
        voice.join(1)  # until what was said is repeated; something that outlives its process may hold the pipe
    return Ended([process.wait() for process in processes], bool(asked))


def _start(member: Member) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "mtjax.train", *member.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **member.environment},
        start_new_session=True,  # a terminal's Ctrl-C comes to this process alone, which passes it on
    )


def _wait(processes: "Sequence[subprocess.Popen[str]]", grace: float) -> None:
    """Returns when all have ended, or `grace` seconds after one failed."""
    failed_at = None
    while any(process.poll() is None for process in processes):
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > grace:
            return
        time.sleep(0.05)


def _speak(process: "subprocess.Popen[str]", prefix: str) -> list[threading.Thread]:
    """Repeats what a process prints, line by line."""

    def repeat(source: IO[str], target: IO[str]) -> None:
        for line in source:
            if "peer ranks" not in line:  # Gloo's, one per pair of devices, and torn where two are written at once
                target.write(f"{prefix}{line}")
                target.flush()
        source.close()

    assert process.stdout is not None
    assert process.stderr is not None
    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    threads = [threading.Thread(target=repeat, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    return threads
