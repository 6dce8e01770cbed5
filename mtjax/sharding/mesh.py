"""From the shape of a mesh to a mesh of devices: virtual CPU devices, the GPUs of the machine, or compile-only devices.

The last axis varies fastest, so that a model-parallel group sits inside one server (appendix B of the paper).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mtjax.errors import UserError
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import DATA

MAX_CPU_DEVICES = 256
"""Virtual devices of one process. XLA runs their collectives, which block, on at most 256 threads (kMaxIntraOpThreads):
with more devices, all threads may wait for a device that has none."""
THREADS_PER_DEVICE = 4
"""XLA's threads for each virtual device. A device has collectives that do not depend on each other, sums over two axes,
or permutes between stages and sums inside one. XLA for CPUs runs them in any order, each on a thread that it blocks:
with a thread a device, as XLA has it, all may wait for one that has none."""


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """A mesh of exactly `shape.size` of the devices, attached or compile-only, all axes explicit."""
    axes = shape.axes
    grid = np.array(devices[: shape.size], dtype=object).reshape([shape.degree((axis,)) for axis in axes])
    return Mesh(grid, axes, axis_types=(AxisType.Explicit,) * len(axes))


def attach_devices(shape: MeshShape, num_processes: int = 1) -> Mesh:
    """The mesh over this machine's devices (all processes' when there are several).

    On a machine with only CPUs it makes as many virtual devices as the mesh needs; call it before anything else
    touches a device.

    Raises:
      UserError: there are fewer GPUs than the mesh needs, or its devices don't divide over the processes.
    """
    if shape.size % num_processes:
        raise UserError(f"mesh {shape} has {shape.size} devices, which don't divide over {num_processes} processes")
    on_cpus = os.environ.get("JAX_PLATFORMS") == "cpu" or not has_gpu()
    if shape.size > 1 and on_cpus:  # XLA reads it when it makes its devices
        threads = THREADS_PER_DEVICE * shape.size // num_processes
        os.environ.setdefault("NPROC", str(min(threads, MAX_CPU_DEVICES)))
    use_cpu_devices(shape.size // num_processes)
    devices = jax.devices()
    if devices[0].platform == "cpu" and shape.size // num_processes > MAX_CPU_DEVICES:
        raise UserError(
            f"mesh {shape} gives a process {shape.size // num_processes} virtual CPU devices, and XLA deadlocks with "
            f"more than {MAX_CPU_DEVICES}: use more processes (--num-processes), as `mtjax train` does by itself"
        )
    if len(devices) < shape.size:
        kind = devices[0].device_kind
        raise UserError(
            f"mesh {shape} needs {shape.size} devices, and there are {len(devices)} ({kind}): choose a smaller mesh, "
            f"or look at the program without the devices: mtjax inspect --mesh {shape}"
        )
    return make_mesh(shape, devices)


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """A mesh of each data way's devices, which may do without the others."""
    names, axis = mesh.axis_names, mesh.axis_names.index(DATA)
    rows = np.split(mesh.devices, mesh.shape[DATA], axis=axis)
    return [Mesh(row, names, axis_types=(AxisType.Explicit,) * len(names)) for row in rows]


def use_cpu_devices(count: int) -> None:
    """Asks for `count` virtual CPU devices, and for the CPU only if the machine has no GPU.

    Without a GPU, CUDA's plugin (installed for compile-only programs) would complain about the missing driver.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices are in use already, as in a test session: their number is fixed
        return
    if not os.environ.get("JAX_PLATFORMS") and not has_gpu():
        jax.config.update("jax_platforms", "cpu")


def has_gpu() -> bool:
    """Whether the machine shows an NVIDIA device, without starting a driver."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
