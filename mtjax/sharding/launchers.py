"""Finds the processes of a run: by the command line, JAX's variables, torchrun, MPI, Slurm or Kubernetes.

Sources that describe a single process are ignored. The first source in this order is used:

1. the command line: --coordinator, --num-processes, --process-id
2. JAX's variables: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID
3. torchrun's variables, which Kubernetes training operators set too: MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
4. Open MPI (mpirun runs inside a Slurm job, not the other way round), Slurm, another MPI
5. a Kubernetes Job
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from mtjax.config import Parallel
from mtjax.errors import UserError

JAX_ADDRESS, JAX_COUNT, JAX_PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
JAX_PORT = "JAX_COORDINATOR_PORT"
"""Port of the coordinator with Slurm, MPI and torchrun; a variable of JAX."""
TORCH_HOST, TORCH_PORT, TORCH_PROCESS, TORCH_COUNT = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"
SLURM_COUNT, SLURM_TASKS, SLURM_PROCESS = "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_PROCID"
SLURM_NEEDS = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", SLURM_TASKS, SLURM_PROCESS, "SLURM_LOCALID")
OPEN_MPI_COUNT, OPEN_MPI_PROCESS = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
OPEN_MPI_NEEDS = (OPEN_MPI_PROCESS, "OMPI_COMM_WORLD_LOCAL_RANK")
OPEN_MPI_URI = "OMPI_MCA_orte_hnp_uri"
"""Open MPI up to version 4: the address of its first process."""

Method = Literal["slurm", "ompi", "mpi4py", "kubernetes"]


@dataclass(frozen=True)
class Launch:
    """The processes of a run, as one source describes them."""

    source: str
    """Its name, with those of the variables or options that were read."""
    count: int
    """Number of processes; -1 when the launcher must be queried."""
    process: int | None = None
    """Index of this process; None when the launcher must be queried."""
    coordinator: str | None = None
    """host:port of process 0; None when the launcher must be queried."""
    method: Method | None = None
    """How the launcher is queried."""
    numbers_freely: bool = False
    """Whether the indices of its processes are unrelated to those of an outer launcher."""


def find_launch(parallel: Parallel, environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Finds the processes of this run; returns None when this is the only one.

    Raises:
      UserError: a source is incomplete, has an impossible value, or contradicts another.
    """
    # A launcher inside another one, such as mpirun in a Slurm job, is listed first, and has to agree with the outer
    # one.
    around = [found for found in (_open_mpi(environment), _slurm(environment), _mpi(environment)) if found]
    for outer in around[1:]:
        _check_agreement(around[0], outer, nested=True)
    # Kubernetes last: a job's pod may run mpirun inside.
    launcher = around[0] if around else _kubernetes(environment)
    torch = _torchrun(environment, launcher)
    jax = _jax_variables(environment, torch or launcher)
    # Each source must agree with those after it in the order of preference.
    options = _options(parallel)
    for i, inner in enumerate((options, jax, torch)):
        for outer in (jax, torch)[i:]:
            _check_agreement(inner, outer, nested=False)
        _check_agreement(inner, launcher, nested=True)
    return options or jax or torch or launcher


def _check_agreement(inner: Launch | None, outer: Launch | None, *, nested: bool) -> None:
    """Checks that two sources can describe the same run.

    Args:
      inner: the source that is preferred.
      outer: the other one.
      nested: whether the outer one may have started launchers, each of which started several processes.

    Raises:
      UserError: they can't.
    """
    if inner is None or outer is None or inner is outer or -1 in (inner.count, outer.count):
        return
    # Slurm may have started one torchrun on each node, which started a process for each GPU.
    if inner.count != outer.count and not (nested and inner.count % outer.count == 0):
        raise UserError(
            f"by {inner.source} the run has {inner.count} processes, and by {outer.source} {outer.count}: "
            "make them equal, or unset one of them"
        )
    known = None not in (inner.process, outer.process) and not inner.numbers_freely
    if known and inner.count == outer.count and inner.process != outer.process:
        raise UserError(
            f"by {inner.source} this is process {inner.process}, and by {outer.source} {outer.process}: "
            "make them equal, or unset one of them"
        )


def _options(parallel: Parallel) -> Launch | None:
    """Reads the command line's options.

    Raises:
      UserError: only some of them are given, or the process is not one of the run's.
    """
    coordinator, count, process = parallel.coordinator, parallel.num_processes, parallel.process_id
    if coordinator is None and count is None and process is None:
        return None
    if coordinator is None or count is None or process is None:
        raise UserError(
            "--coordinator HOST:PORT, --num-processes N and --process-id I are required together: set all three"
        )
    if not 0 <= process < count:
        raise UserError(f"--process-id {process} is not one of --num-processes {count}: it runs from 0 to {count - 1}")
    return Launch("the command line (--num-processes, --process-id)", count, process, coordinator)


def _jax_variables(environment: Mapping[str, str], launcher: Launch | None) -> Launch | None:
    """Reads JAX's variables; values that are missing are taken from a launcher."""
    coordinator = environment.get(JAX_ADDRESS)
    count, process = _number(environment, JAX_COUNT, 1), _number(environment, JAX_PROCESS, 0)
    if count == 1 or (coordinator is None and count is None and process is None):
        return None
    # An address alone replaces the launcher's coordinator.
    if count is None and process is None and launcher is not None:
        return replace(launcher, coordinator=coordinator)
    source = f"JAX's environment ({JAX_COUNT}, {JAX_PROCESS})"
    values = {JAX_ADDRESS: coordinator, JAX_COUNT: count, JAX_PROCESS: process}
    return _completed(Launch(source, count or -1, process, coordinator), values, launcher)


def _torchrun(environment: Mapping[str, str], launcher: Launch | None) -> Launch | None:
    """Reads torchrun's variables; values that are missing are taken from a launcher.

    MASTER_ADDR and MASTER_PORT alone do not count: job scripts export them for other programs.
    """
    host, port = environment.get(TORCH_HOST), _number(environment, TORCH_PORT, 1)
    count, process = _number(environment, TORCH_COUNT, 1), _number(environment, TORCH_PROCESS, 0)
    if count == 1 or (count is None and process is None):
        return None
    # torchrun's agent listens at MASTER_PORT itself, so jax's service needs another port.
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    jax_port = _number(environment, JAX_PORT, 1)
    service_port = jax_port or (None if port is None else port + has_agent)
    bracketed = f"[{host}]" if host and ":" in host and not host.startswith("[") else host
    coordinator = None if not host or service_port is None else f"{bracketed}:{service_port}"
    source = f"torchrun's environment ({TORCH_COUNT}, {TORCH_PROCESS})"
    values = {TORCH_HOST: host, TORCH_PORT: service_port, TORCH_PROCESS: process, TORCH_COUNT: count}
    found = Launch(source, count or -1, process, coordinator, numbers_freely="TORCHELASTIC_RUN_ID" in environment)
    return _completed(found, values, launcher)


def _completed(found: Launch, values: Mapping[str, object], launcher: Launch | None) -> Launch:
    """Completes the values of variables with those of an outer launcher.

    Args:
      found: the values of the variables; -1 and None for those that are not set.
      values: by variable; None where it is not set.
      launcher: Slurm's, MPI's or Kubernetes's; None without one.

    Raises:
      UserError: something is still missing, or the process is not one of the run's.
    """
    missing = [name for name, value in values.items() if value is None]
    if missing and launcher is not None:
        count = launcher.count if found.count == -1 else found.count
        # With another number of processes, such as several per Slurm task, the launcher's index is not this process'.
        process = launcher.process if found.process is None and launcher.count == count else found.process
        coordinator = found.coordinator or launcher.coordinator
        method = None if coordinator else launcher.method
        found = replace(found, count=count, process=process, coordinator=coordinator, method=method)
        if count != -1 and process is not None and (coordinator or method):
            missing = []
    if missing:
        present, required = (", ".join(names) for names in ([n for n in values if n not in missing], values))
        raise UserError(
            f"the environment has {present}, but not {' or '.join(missing)}: set {required}, or unset all of them"
        )
    assert found.process is not None, "nothing is missing"
    if found.process >= found.count:
        raise UserError(f"by {found.source} this is process {found.process} of {found.count}: processes count from 0")
    return found


def _open_mpi(environment: Mapping[str, str]) -> Launch | None:
    """Reads Open MPI's variables; returns None for a single process."""
    count = _number(environment, OPEN_MPI_COUNT, 1) or 1
    if count == 1:
        return None
    _need(environment, "Open MPI", OPEN_MPI_COUNT, OPEN_MPI_NEEDS)
    # Open MPI 5 does not set the address of its first process: it is exchanged through mpi4py.
    method: Method = "ompi" if OPEN_MPI_URI in environment else "mpi4py"
    process = _number(environment, OPEN_MPI_PROCESS, 0)
    return Launch(f"Open MPI ({OPEN_MPI_COUNT})", count, process, method=method)


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    """Reads the variables of an srun step; SLURM_NTASKS alone is also set in a plain batch script."""
    count = _number(environment, SLURM_COUNT, 1) or 1
    if count == 1:
        return None
    _need(environment, "Slurm", SLURM_COUNT, SLURM_NEEDS)
    tasks = _number(environment, SLURM_TASKS, 1)
    if tasks != count:
        raise UserError(f"{SLURM_COUNT} is {count} and {SLURM_TASKS} is {tasks}: start all processes with one srun")
    return Launch(f"Slurm ({SLURM_COUNT})", count, _number(environment, SLURM_PROCESS, 0), method="slurm")


def _mpi(environment: Mapping[str, str]) -> Launch | None:
    """Reads the variables of another MPI; returns None for a single process."""
    count = _number(environment, "PMI_SIZE", 1) or 1
    process = _number(environment, "PMI_RANK", 0)
    return None if count == 1 else Launch("MPI (PMI_SIZE)", count, process, method="mpi4py")


def _kubernetes(environment: Mapping[str, str]) -> Launch | None:
    """Detects a Kubernetes Job, from which the number of processes is queried."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    return Launch("Kubernetes (JOB_COMPLETION_INDEX)", -1, method="kubernetes")


def check_library(launch: Launch) -> None:
    """Checks that the library is installed with which jax queries the launcher.

    Raises:
      UserError: it isn't.
    """
    library = {"mpi4py": "mpi4py", "kubernetes": "kubernetes"}.get(launch.method or "")
    if library is not None and find_spec(library) is None:
        raise UserError(
            f"{launch.source} started several processes, which connect through the library {library}: "
            f"pip install {library}, or set --coordinator, --num-processes and --process-id"
        )


def _number(environment: Mapping[str, str], name: str, least: int) -> int | None:
    """Returns an integer variable's value; None where it is not set.

    Raises:
      UserError: it is not an integer, or is less than `least`.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UserError(f"the environment variable {name} is {text!r}, and should be an integer of at least {least}")
    return int(text)


def _need(environment: Mapping[str, str], launcher: str, seen: str, names: tuple[str, ...]) -> None:
    """Checks that the variables `names` are set, as `seen` is.

    Raises:
      UserError: some are not.
    """
    missing = [name for name in names if not environment.get(name)]
    if missing:
        raise UserError(
            f"the environment has {launcher}'s {seen}={environment[seen]}, but not {', '.join(missing)}: start every "
            f"process with {launcher}, or unset {seen}"
        )
