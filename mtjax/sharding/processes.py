"""Multi-process runs: initializes `jax.distributed` with the settings that `mtjax.sharding.launchers` found."""

import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
from jax._src import clusters  # queries Slurm, MPI and Kubernetes for the coordinator; has no public name

from mtjax.config import Parallel
from mtjax.errors import UserError, first_line
from mtjax.sharding.launchers import JAX_PORT, Launch, check_library, find_launch

START_TIMEOUT = 300
"""Seconds that process 0 waits for all processes, and these for process 0 and the name of its host."""
NAME_TIMEOUT = 30
"""Seconds that process 0 waits until its host's name has an address."""
HEARTBEAT_TIMEOUT = 3600
"""Seconds after which jax ends a run that lost a process, with a stack trace. Training has a faster check."""
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
LAST_PORT = 65535
LOCAL_VARIABLES = (
    ("torchrun", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    ("Slurm", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID"),
    ("Open MPI", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
"""By launcher, the variables of the number of processes on this host and of this process' local rank. A launcher that
runs inside another one comes first."""


def start_processes(parallel: Parallel, environment: Mapping[str, str] = os.environ) -> int:
    """Connects this process to the other processes of its run, before any device is used.

    Returns:
      The number of processes; 1 when no option or variable describes several.

    Raises:
      UserError: the options or variables that describe the processes are incomplete or contradictory, the
        coordinator's address can't be used, or a process did not connect in time.
    """
    launch = find_launch(parallel, environment)
    if launch is None:
        return 1
    check_library(launch)
    devices = local_devices(environment)
    coordinator, count, process, devices = _resolve(launch, devices)
    host, port = parse_address(coordinator, "--coordinator" if parallel.coordinator else launch.source)
    if process == 0:
        # Before jax tries: its service would end the process with a C++ stack.
        _check_port(environment.get(BIND_ADDRESS) or f"[::]:{port}", coordinator)
    _await_name(host, coordinator, NAME_TIMEOUT if process == 0 else START_TIMEOUT)
    _initialize(
        coordinator_address=coordinator,
        num_processes=count,
        process_id=process,
        local_device_ids=devices,
        cluster_detection_method="deactivate",  # all values are given
    )
    return count


def several_expected(parallel: Parallel, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the options or the environment describe several processes.

    Raises:
      UserError: these are incomplete or contradictory.
    """
    return find_launch(parallel, environment) is not None


def parse_address(address: str, source: str) -> tuple[str, int]:
    """Splits an address into host and port; an IPv6 host is written in brackets.

    Raises:
      UserError: it is not host:port; names `source`, which gave it.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise UserError(f"{source} gives the address {address!r}, which should be HOST:PORT: use {_example(address)}")
    if not port.isdecimal() or not 1 <= int(port) <= LAST_PORT:
        raise UserError(f"{source} gives the address {address!r}, whose port should be a number from 1 to {LAST_PORT}")
    return host.strip("[]"), int(port)


def _example(address: str) -> str:
    host = address.strip(":[]") or "localhost"
    return f"[{host}]:12345" if ":" in host else f"{host}:12345"


def _resolve(launch: Launch, devices: list[int] | None) -> tuple[str, int, int, list[int] | None]:
    """Returns the coordinator's address, the number of processes, the index of this one and its GPUs.

    Values that `launch` does not have are queried from the launcher.

    Raises:
      UserError: the launcher does not have them.
    """
    if launch.method is None:
        assert launch.coordinator is not None and launch.process is not None, "only a launcher can be queried"
        return launch.coordinator, launch.count, launch.process, devices
    # jax's method for Kubernetes has no name; without one, jax detects it by its environment.
    method = None if launch.method == "kubernetes" else launch.method
    count = None if launch.count == -1 else launch.count
    try:
        found: Any = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            launch.coordinator, count, launch.process, devices, method, START_TIMEOUT
        )
    except Exception as e:  # whatever the launcher's library raises
        raise UserError(
            f"{launch.source} does not provide the coordinator's address and the processes: {first_line(e)}"
        ) from e
    if None in found[:3]:
        raise UserError(
            f"{launch.source} does not provide the coordinator's address and the processes: set --coordinator, "
            "--num-processes and --process-id"
        )
    return found


def _check_port(bind_address: str, coordinator: str) -> None:
    """Checks that process 0 can listen at the address of jax's coordination service, whose failure ends the process.

    Raises:
      UserError: it can't.
    """
    host, port = parse_address(bind_address, BIND_ADDRESS)
    # gRPC listens at [::], which on most machines is IPv6 and IPv4; on one without IPv6 it is IPv4 alone.
    for family in (socket.AF_INET6, socket.AF_INET):
        name = "0.0.0.0" if host == "::" and family == socket.AF_INET else host
        try:
            _listen(name, port, family)
        except socket.gaierror:
            continue  # the host has no address of this family
        except OSError as e:
            in_use = e.errno == errno.EADDRINUSE
            if family == socket.AF_INET6 and not in_use:
                continue  # a machine without IPv6
            reason = "another program listens there" if in_use else first_line(e)
            raise UserError(
                f"process 0 can't listen at port {port} of the coordinator's address {coordinator}: {reason}; "
                f"set another port in all processes (with a launcher: {JAX_PORT})"
            ) from e
        return


def _listen(host: str, port: int, family: socket.AddressFamily) -> None:
    """Opens and closes a listening socket at an address.

    Raises:
      OSError: that is not possible; `socket.gaierror` where the host has no address of this family.
    """
    address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: it can then listen at a port whose connection of an earlier run has just been closed.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(address)
        probe.listen()


def _await_name(host: str, coordinator: str, timeout: float) -> None:
    """Waits until the coordinator's host has an address: on Kubernetes a name appears with its pod.

    Raises:
      UserError: it has none in time.
    """
    start, is_announced = time.monotonic(), False
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (socket.gaierror, UnicodeError) as e:
            if time.monotonic() - start >= timeout:
                raise UserError(
                    f"the host of the coordinator's address {coordinator} has no address here after {timeout:.0f} s: "
                    f"{first_line(e)}"
                ) from e
        if not is_announced:
            print(f"waiting up to {timeout:.0f} s for an address of the host {host!r}", file=sys.stderr, flush=True)
            is_announced = True
        time.sleep(min(1.0, timeout))


def _initialize(**options: object) -> None:
    """Calls `jax.distributed.initialize`, and turns its errors into a sentence."""
    try:
        jax.distributed.initialize(
            initialization_timeout=START_TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            **options,  # pyright: ignore[reportArgumentType]
        )
    except (RuntimeError, ValueError) as e:
        raise UserError(f"the processes of this run could not connect to each other: {first_line(e)}") from e


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs of this process among those of its host: all when it is the host's only process, else one.

    With None, jax uses all of them unless the launcher assigns some.

    Raises:
      UserError: there are more processes on this host than it has GPUs.
    """
    present = next((names for names in LOCAL_VARIABLES if environment.get(names[1])), None)
    if present is None:
        return None
    launcher, of_host, of_process = present
    visible = visible_gpus(environment)
    # Without asking a driver: jax must be told its devices before it attaches any.
    count = len(list(Path("/dev").glob("nvidia[0-9]*"))) if visible is None else len(visible)
    # Slurm's variable is a list by node, such as 8(x4): one process per host is "1" or "1(x4)".
    processes = environment[of_host]
    if processes == "1" or processes.startswith("1("):
        return list(range(count)) or None
    if visible and count == 1:
        return [0]  # the launcher makes one GPU visible to each process
    rank = environment.get(of_process, "")
    if count == 0 or not rank.isdecimal():
        return None
    if int(rank) >= count:
        raise UserError(
            f"{launcher} started process {rank} of this machine ({of_process}), which has {count} GPUs, one for each "
            f"process: start at most {count} processes on a machine"
        )
    return [int(rank)]


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Returns the GPUs that `CUDA_VISIBLE_DEVICES` names, as CUDA reads it; None if the variable is not set.

    An empty list hides all GPUs, as "" and "-1" do.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    # CUDA sees those before the first name that is not a device's. Slurm writes NoDevFiles for a job without GPUs.
    return list(takewhile(lambda name: name[:1].isdigit() or name.startswith(("GPU-", "MIG-")), names))
