"""Runs a training run in several processes on this machine, and restarts it after failures."""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from mtjax import config as configs
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.launch.devices import mesh_within, working_gpus
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import AUTO, parse_mesh
from mtjax.runtime.devices import MAX_CPU_DEVICES
from mtjax.runtime.processes.local import MAX_PROCESSES, Ended, Member, member_arguments, processes_needed, run_members
from mtjax.sharding.launchers import find_launch
from mtjax.train.folder.run_folder import choose_folder

LONGEST_PAUSE = 60.0
"""Maximum pause before a restart in seconds; pauses double up to it."""


def launch(
    arguments: Sequence[str],
    config: Config,
    name: str,
    processes: int | None,
    restarts: int,
    environment: Mapping[str, str],
    *,
    gpus: Callable[[], list[str] | None] = working_gpus,
) -> int:
    """Runs `mtjax train` until it is done, is requested to stop, has invalid input, or has failed more than `restarts`
    times.

    Args:
      arguments: of `mtjax train`.
      config: the config of these arguments.
      name: of the config, for the run's folder.
      processes: number of processes; None derives it from the devices.
      restarts: maximum number of restarts.
      environment: of this process.
      gpus: returns the working GPUs of this machine; called before each start.

    Returns:
      The exit code.

    Raises:
      UserError: the run can't be started with these options; nothing has been started.
    """
    if (found := find_launch(config.parallel, environment)) is not None:
        raise UserError(
            f"mtjax launch starts the processes itself, and {found.source} already defines them: remove --coordinator, "
            "--num-processes and --process-id, and do not start it with srun, mpirun or torchrun"
        )
    devices = gpus()
    mesh, size = _mesh(config, devices, processes)
    count = processes or _count(config, devices, environment)
    check_processes(mesh, size, count, devices)
    if mesh != AUTO:
        check_config(config, parse_mesh(mesh))
    # Devices of a process: also after a restart on fewer devices, so that processes become fewer and not smaller.
    share = size // count
    # Chosen once: each restart has to find the checkpoints of the attempt before.
    folder = choose_folder(config.output, name)
    arguments = [*arguments, "--out", str(folder)]
    for attempt in range(restarts + 1):
        if attempt:
            devices = gpus()
            mesh, size = _mesh(_within(config, devices), devices, processes)
        used = None if devices is None else devices[:size]
        ended = _run([*arguments, "--mesh", mesh], max(1, size // share), used, config.parallel.peer_timeout)
        # 2 is wrong input, with which another attempt would end the same way; 130 is Ctrl-C.
        if ended.requested or ended.code in (0, 2, 130) or attempt == restarts:
            return ended.code
        pause = min(LONGEST_PAUSE, 2.0**attempt)
        _say(f"{reason(ended)}; restart {attempt + 1} of {restarts} in {pause:.0f} s")
        time.sleep(pause)
        arguments = [*arguments, "--resume"]
    raise AssertionError("the last attempt returns")


def _mesh(config: Config, gpus: Sequence[str] | None, processes: int | None) -> tuple[str, int]:
    """Returns the run's mesh and its number of devices; for `auto` the machine's GPUs, or without GPUs one device per
    process."""
    if config.parallel.mesh == AUTO:
        return AUTO, (processes or 1) if gpus is None else len(gpus)
    mesh_shape = parse_mesh(config.parallel.mesh)
    return str(mesh_shape), mesh_shape.size


def _within(config: Config, gpus: Sequence[str] | None) -> Config:
    """Returns the config with a mesh that fits the GPUs that are left."""
    if gpus is None or config.parallel.mesh == AUTO:
        return config
    return configs.replace(config, mesh=str(mesh_within(config, len(gpus))))


def check_processes(mesh: str, size: int, count: int, gpus: Sequence[str] | None) -> None:
    """Checks that this machine can run the processes of a mesh of `size` devices.

    Raises:
      UserError: the devices are not divisible by the processes, there are too many processes, or too few devices.
    """
    if count > MAX_PROCESSES:
        raise UserError(f"{count} processes are too many for one machine: at most {MAX_PROCESSES} are allowed")
    if gpus is not None and size > len(gpus):
        raise UserError(f"mesh {mesh} needs {size} devices, and this machine has {len(gpus)} working GPUs")
    if size == 0 or size % count:
        raise UserError(f"mesh {mesh} has {size} devices, which is not divisible by --processes {count}")
    if gpus is None and size // count > MAX_CPU_DEVICES:
        raise UserError(
            f"mesh {mesh} gives each of {count} processes {size // count} virtual CPU devices, and XLA supports at "
            f"most {MAX_CPU_DEVICES}: use --processes {-(-size // MAX_CPU_DEVICES)} or more"
        )


def reason(ended: Ended) -> str:
    """Describes why a run failed."""
    reasons = {
        number: f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        for number, code in enumerate(ended.codes)
        if code
    }
    # A process that was killed by a signal made the others end.
    first = min(reasons, key=lambda number: (ended.codes[number] >= 0, number))
    return f"process {first} {reasons[first]}"


def _count(config: Config, gpus: Sequence[str] | None, environment: Mapping[str, str]) -> int:
    return processes_needed(config, environment) if gpus is None else max(1, _mesh(config, gpus, None)[1])


def _run(arguments: Sequence[str], count: int, gpus: Sequence[str] | None, peer_timeout: float) -> Ended:
    commands = member_arguments(arguments, count) if count > 1 else [list(arguments)]
    share = len(gpus) // count if gpus else 0
    members = [
        Member(
            command, f"[{i}] ", {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * share : (i + 1) * share])} if gpus else {}
        )
        for i, command in enumerate(commands)
    ]
    return run_members(members, peer_timeout)


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)
