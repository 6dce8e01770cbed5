"""From "64x8" to a mesh of devices: virtual ones on a CPU, the GPUs that are there, or compile-only ones.

`model` varies fastest, so that a model-parallel group sits inside one server (appendix B of the paper).
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mtjax.errors import UserError, nearest
from mtjax.sharding.axes import DATA, MODEL

AXES = (DATA, MODEL)
"""Mesh axes, outermost first."""

MAX_CPU_DEVICES = 256
"""Virtual devices of one process. XLA runs their collectives, which block, on at most 256 threads (kMaxIntraOpThreads):
with more devices, all threads may wait for a device that has none."""


@dataclass(frozen=True)
class MeshShape:
    """Ways of each mesh axis."""

    data: int = 1
    model: int = 1

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.data * self.model

    def ways(self, axis: str | None) -> int:
        """Ways of a mesh axis by its name; None has one."""
        return 1 if axis is None else getattr(self, axis)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


def parse_mesh(text: str) -> MeshShape:
    """Reads "64x8" (DATAxMODEL) or "data=64,model=8".

    Raises:
      UserError: the text is neither, names an unknown axis, or has a way below 1.
    """
    positional = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if positional:
        ways = dict(zip(AXES, map(int, positional.groups()), strict=True))
    else:
        named = [_named_axis(text, part) for part in text.split(",")]
        ways = dict(named)
        if len(ways) < len(named):
            raise UserError(f"mesh {text!r} names an axis twice; say data and model once each")
    for axis, n in ways.items():
        if n < 1:
            raise UserError(f"mesh {text!r} gives {axis} {n} ways; every axis needs at least 1")
    return MeshShape(**ways)


def _named_axis(text: str, part: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
    if not match:
        raise UserError(f"mesh {text!r} is neither DATAxMODEL, like 64x8, nor named, like data=64,model=8")
    if match[1] not in AXES:
        raise UserError(f"mesh {text!r} names an unknown axis {match[1]!r}{nearest(match[1], AXES)}")
    return match[1], int(match[2])


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """A mesh of exactly `shape.size` of the devices, attached or compile-only, all axes explicit."""
    grid = np.array(devices[: shape.size], dtype=object).reshape(shape.data, shape.model)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def attach_devices(shape: MeshShape, num_processes: int = 1) -> Mesh:
    """The mesh over this machine's devices (all processes' when there are several).

    On a machine with only CPUs it makes as many virtual devices as the mesh has places; call it before anything else
    touches a device.

    Raises:
      UserError: there are fewer GPUs than places, or the places don't divide over the processes.
    """
    if shape.size % num_processes:
        raise UserError(f"mesh {shape} has {shape.size} places, which don't divide over {num_processes} processes")
    use_cpu_devices(shape.size // num_processes)
    devices = jax.devices()
    if devices[0].platform == "cpu" and shape.size // num_processes > MAX_CPU_DEVICES:
        raise UserError(
            f"mesh {shape} gives a process {shape.size // num_processes} virtual CPU devices, and XLA deadlocks with "
            f"more than {MAX_CPU_DEVICES}: take more processes (--num-processes), as `mtjax train` does by itself"
        )
    if len(devices) < shape.size:
        kind = devices[0].device_kind
        raise UserError(
            f"mesh {shape} needs {shape.size} devices, and there are {len(devices)} ({kind}): choose a smaller mesh, "
            f"or look at the program without the devices: mtjax inspect --mesh {shape}"
        )
    return make_mesh(shape, devices)


def use_cpu_devices(count: int) -> None:
    """Asks for `count` virtual CPU devices, and for the CPU alone where no GPU is.

    Without a GPU, CUDA's plugin (there for compile-only programs) would complain of the missing driver.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # devices are in use already, as in a test session: what is there is there
        return
    if not os.environ.get("JAX_PLATFORMS") and not has_gpu():
        jax.config.update("jax_platforms", "cpu")


def has_gpu() -> bool:
    """Whether the machine shows an NVIDIA device, without starting a driver."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
