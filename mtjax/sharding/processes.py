"""Several processes as one run: `jax.distributed` from Slurm, MPI or Kubernetes, or from the command line."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax

from mtjax.config import Parallel
from mtjax.errors import UserError, first_line

START_TIMEOUT = 300
"""Seconds that process 0 waits for the others to appear."""
HEARTBEAT_TIMEOUT = 3600
"""Seconds after which jax ends a run that lost a process, with a stack. Training has a quicker watch of its own."""


def start_processes(parallel: Parallel, environment: Mapping[str, str] = os.environ) -> int:
    """Joins this process to its run, before any device is touched.

    Returns:
      How many processes take part; 1 when nothing says that there are several.

    Raises:
      UserError: --coordinator, --num-processes and --process-id are not given together or don't fit, or a
        process did not appear in time.
    """
    if any(v is not None for v in (parallel.coordinator, parallel.num_processes, parallel.process_id)):
        return _from_options(parallel)
    launcher, count = detect_launcher(environment)
    if count == 1:
        return 1
    method = "mpi4py" if launcher == "MPI" else None
    _initialize(local_device_ids=local_devices(environment), cluster_detection_method=method)
    return jax.process_count()


def several_expected(parallel: Parallel, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether options or a launcher say that there are other processes."""
    given = (parallel.coordinator, parallel.num_processes, parallel.process_id)
    return any(v is not None for v in given) or detect_launcher(environment)[1] != 1


def detect_launcher(environment: Mapping[str, str]) -> tuple[str, int]:
    """The launcher that started this process, and how many it started: ("Slurm", 64), or ("", 1)."""
    counts = {
        "Slurm": "SLURM_STEP_NUM_TASKS",  # of this srun; SLURM_NTASKS is set in a plain batch script too
        "Open MPI": "OMPI_COMM_WORLD_SIZE",
        "MPI": "PMI_SIZE",
    }
    for launcher, variable in counts.items():
        count = environment.get(variable, "1")
        if count.isdigit() and int(count) > 1:
            return launcher, int(count)
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes", -1  # the Job knows the number; jax.distributed asks it
    return "", 1


def _from_options(parallel: Parallel) -> int:
    count, process = parallel.num_processes, parallel.process_id
    if parallel.coordinator is None or count is None or process is None:
        raise UserError("--coordinator HOST:PORT, --num-processes N and --process-id I go together: give all three")
    if not 0 <= process < count:
        raise UserError(f"--process-id {process} is not one of --num-processes {count}: it runs from 0 to {count - 1}")
    _initialize(coordinator_address=parallel.coordinator, num_processes=count, process_id=process)
    return count


def _initialize(**options: object) -> None:
    try:
        jax.distributed.initialize(
            initialization_timeout=START_TIMEOUT,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            **options,  # pyright: ignore[reportArgumentType]
        )
    except (RuntimeError, ValueError) as e:
        raise UserError(f"the processes of this run did not find each other: {first_line(e)}") from e


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """All GPUs of the host when it has one process; None lets jax give each process its own."""
    per_host = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", ""))
    if not (per_host == "1" or per_host.startswith("1(")):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    count = len(visible.split(",")) if visible else len(list(Path("/dev").glob("nvidia[0-9]*")))
    return list(range(count)) or None
