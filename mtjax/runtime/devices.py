"""The devices of a process: the machine's GPUs, or virtual CPU devices."""

import os
from collections.abc import Mapping
from pathlib import Path

import jax
from jax.sharding import Mesh

from mtjax.errors import UserError
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.layout.mesh import MeshShape
from mtjax.sharding.device_mesh import make_mesh
from mtjax.sharding.processes import visible_gpus

MAX_CPU_DEVICES = 256
"""Virtual devices of one process. XLA: on CPUs, their collectives block, on at most 256 threads (kMaxIntraOpThreads):
with more devices, all threads may wait for a device without a thread."""
THREADS_PER_DEVICE = 4
"""XLA's threads for each virtual device. XLA: on CPUs, collectives of a device that do not depend on each other, such
as all-reduces over two axes, run in any order, each blocking a thread. With one thread per device, XLA's default, all
may wait for a device without a thread."""

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables of this share, of which jax takes one alone; the second is an older name."""


def attach_devices(mesh_shape: MeshShape, num_processes: int = 1) -> Mesh:
    """Builds the mesh over this machine's devices (those of all processes when there are several).

    On a machine with only CPUs it creates as many virtual devices as the mesh needs; call it before anything else
    uses a device.

    Raises:
      UserError: there are fewer GPUs than the mesh needs, or its size is not a multiple of the number of processes.
    """
    if mesh_shape.size % num_processes:
        raise UserError(
            f"mesh {mesh_shape} has {mesh_shape.size} devices, which is not a multiple of {num_processes} processes: "
            "choose another mesh or another number of processes"
        )
    # Without asking jax, which would create the devices.
    if mesh_shape.size > 1 and not has_gpu():  # XLA: it reads NPROC when it creates its devices
        threads = THREADS_PER_DEVICE * mesh_shape.size // num_processes
        os.environ.setdefault("NPROC", str(min(threads, MAX_CPU_DEVICES)))
    # On a machine with GPUs, too: there the number of CPU devices has no effect.
    use_cpu_devices(mesh_shape.size // num_processes)
    devices = jax.devices()
    if devices[0].platform == "cpu" and mesh_shape.size // num_processes > MAX_CPU_DEVICES:
        raise UserError(
            f"mesh {mesh_shape} gives a process {mesh_shape.size // num_processes} virtual CPU devices, and XLA "
            f"deadlocks with more than {MAX_CPU_DEVICES}: use more processes (--num-processes), as `mtjax train` does "
            "automatically"
        )
    if len(devices) < mesh_shape.size:
        kind = devices[0].device_kind
        raise UserError(
            f"mesh {mesh_shape} needs {mesh_shape.size} devices, and there are {len(devices)} ({kind}): choose a "
            f"smaller mesh, or inspect the program without the devices: mtjax inspect --mesh {mesh_shape}"
        )
    return make_mesh(mesh_shape, devices)


def use_cpu_devices(count: int) -> None:
    """Requests `count` virtual CPU devices, and restricts jax to the CPU if the machine has no GPU; sets how much of a
    GPU it may take."""
    use_gpu_memory()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices exist already, as in tests: their number is fixed
        return
    # Without a GPU, CUDA's plugin (installed for compile-only programs) would warn about the missing driver.
    if not os.environ.get("JAX_PLATFORMS") and not has_gpu():
        jax.config.update("jax_platforms", "cpu")


def use_gpu_memory() -> None:
    """Lets jax take `USABLE_MEMORY` of a GPU, by default 75%, unless the environment has another share."""
    if not any(name in os.environ for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(USABLE_MEMORY)


def has_gpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether jax takes GPUs: whether the machine has an NVIDIA device file, and the environment neither hides
    all GPUs (`CUDA_VISIBLE_DEVICES`) nor restricts jax to the CPUs (`JAX_PLATFORMS`). It starts no driver."""
    if environment.get("JAX_PLATFORMS") == "cpu" or visible_gpus(environment) == []:
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
