"""Several processes of one run on this machine: how many it needs, and how they start, print and end together."""

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
from mtjax.layout.mesh import AUTO, parse_mesh
from mtjax.runtime.devices import MAX_CPU_DEVICES, has_gpu
from mtjax.runtime.processes.signals import requests
from mtjax.sharding.processes import several_expected

MAX_PROCESSES = 64
"""Maximum number of processes on one machine: each needs some 300 MB before it has a model."""
GRACE = 15.0
"""Seconds after the peer timeout until the remaining processes of a failed run are killed."""


def processes_needed(config: Config, environment: Mapping[str, str]) -> int:
    """Returns how many processes the run's virtual CPU devices need; 1 if this process suffices.

    Raises:
      UserError: the mesh is invalid, needs too many processes, or has an axis that mtjax does not support yet.
    """
    if config.parallel.mesh == AUTO:
        return 1
    mesh_shape = parse_mesh(config.parallel.mesh)
    size = mesh_shape.size
    if size <= MAX_CPU_DEVICES or several_expected(config.parallel, environment) or has_gpu(environment):
        return 1
    # As few as possible: collectives between processes are slow (docs/notes/architecture.md).
    for count in range(2, MAX_PROCESSES + 1):
        if size % count == 0 and size // count <= MAX_CPU_DEVICES:
            return count
    raise UserError(
        f"mesh {mesh_shape} has {size} devices, which up to {MAX_PROCESSES} processes of at most {MAX_CPU_DEVICES} "
        f"virtual CPU devices can't provide: use another mesh, or only inspect the program: "
        f"mtjax inspect --mesh {mesh_shape}"
    )


def member_arguments(arguments: Sequence[str], count: int) -> list[list[str]]:
    """Returns the arguments of `mtjax train` for each of `count` processes that connect on this machine."""
    with socket.socket() as probe:
        # The system chooses a free port; another program could take it before the first process listens, which it
        # reports.
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    options = ["--coordinator", coordinator, "--num-processes", str(count), "--process-id"]
    return [[*arguments, *options, str(number)] for number in range(count)]


@dataclass(frozen=True)
class Member:
    """A process to start."""

    arguments: Sequence[str]
    """Arguments of `mtjax train`."""
    prefix: str = ""
    """Prefix of each line that it prints."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to this process's."""


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended."""

    codes: Sequence[int]
    """Exit code of each process; minus the signal number if a signal ended it."""
    requested: bool
    """Whether this process was requested to end them."""

    @property
    def code(self) -> int:
        """Exit code of the run: 2 if the input was wrong, otherwise that of the first process that failed, as in
        shells."""
        failed = [code for code in self.codes if code]
        first = 2 if 2 in failed else next(iter(failed), 0)
        return first if first >= 0 else 128 - first


def run_members(members: Sequence[Member], peer_timeout: float) -> Ended:
    """Runs processes until all have ended; after one fails, kills those that do not end in time.

    Requests to stop are forwarded to each process.
    """
    processes = [_start(member) for member in members]
    requested: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        requested.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in requests()}
    output_threads = [
        _forward_output(process, member.prefix) for process, member in zip(processes, members, strict=True)
    ]
    try:
        _wait(processes, peer_timeout + GRACE)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its children, which would keep its pipes open
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for thread in (thread for pair in output_threads for thread in pair):
        thread.join(1)  # until its output is forwarded; a child that outlives it may keep the pipe open
    return Ended([process.wait() for process in processes], bool(requested))


def _start(member: Member) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "mtjax.train", *member.arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **member.environment},
        start_new_session=True,  # so that a terminal's Ctrl-C reaches this process only, which forwards it
    )


def _wait(processes: "Sequence[subprocess.Popen[str]]", grace: float) -> None:
    """Returns when all have ended, or `grace` seconds after one failed."""
    failed_at = None
    while any(process.poll() is None for process in processes):
        # The others get the time in which they notice it by themselves, and report what they know.
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > grace:
            return
        time.sleep(0.05)


def _forward_output(process: "subprocess.Popen[str]", prefix: str) -> list[threading.Thread]:
    """Forwards what a process prints, line by line, in two threads."""

    def repeat(source: IO[str], target: IO[str]) -> None:
        for line in source:
            if "peer ranks" not in line:  # Gloo's messages, one per pair of devices, interleaved with other lines
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
