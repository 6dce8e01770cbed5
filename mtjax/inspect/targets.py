"""Targets of compilation: virtual CPUs, the GPUs of this machine, or absent GPUs (compile-only devices)."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo  # what cuDNN supports, judged by the attached GPU
from jax.experimental import topologies
from jax.sharding import Mesh

from mtjax.analysis import target as server_files
from mtjax.analysis.hardware import SERVERS, Server, by_device_kind
from mtjax.errors import UserError, install_extra
from mtjax.layout.mesh import MeshShape
from mtjax.runtime.devices import MAX_CPU_DEVICES, attach_devices, has_gpu, use_gpu_memory
from mtjax.sharding.device_mesh import make_mesh

CPU = "cpu"
ATTACHED = "attached"
PLUGIN = "jax_cuda13_plugin"


@dataclass(frozen=True)
class Target:
    """Devices to compile for, and their servers."""

    name: str
    """As given by the user."""
    server: Server | None
    """None for CPUs and for GPUs that are not in the hardware table."""
    is_gpu: bool
    """Whether programs are for GPUs: XLA for CPUs promotes bf16 reductions and rewrites reduce-scatters."""

    @property
    def devices_per_server(self) -> int:
        """Consecutive devices of the mesh that share a server; all devices where there are no servers."""
        # Larger than any mesh.
        return self.server.gpus if self.server else 1 << 30

    def mesh(self, mesh_shape: MeshShape) -> Mesh:
        """Builds a mesh of this target's devices.

        Raises:
          UserError: this machine can't compile for them, or not enough devices are attached.
        """
        if self.name in (CPU, ATTACHED):
            if self.name == CPU and mesh_shape.size > MAX_CPU_DEVICES:
                raise UserError(
                    f"mesh {mesh_shape} has {mesh_shape.size} devices, and --target {CPU} compiles for at most "
                    f"{MAX_CPU_DEVICES}: add --target h100x8, which compiles for GPUs and needs none"
                )
            return attach_devices(mesh_shape)
        assert self.server is not None
        return make_mesh(mesh_shape, compile_only_devices(self.server, mesh_shape.size))


def find_target(name: str, link: float | None = None, network: float | None = None) -> Target:
    """Parses `--target`.

    Args:
      name: "cpu", "attached", GPUxGPUS-PER-SERVER such as "h100x8", or a .toml file.
      link: bytes/s of a GPU inside its server, instead of the server's.
      network: bytes/s of a GPU between servers, instead of the server's.

    Raises:
      UserError: there is no such target, or bandwidths are given for CPUs.
    """
    # No time is predicted for CPUs, so that bandwidths would be ignored without a word.
    if name == CPU:
        if link or network:
            raise UserError("--intra-bandwidth and --inter-bandwidth need a GPU target, and the target is cpu")
        return Target(name, None, is_gpu=False)
    server = attached_server() if name == ATTACHED else server_files.parse(name)
    speeds = {"link": link, "network": network}
    changed = dataclasses.replace(server, **{k: v for k, v in speeds.items() if v is not None})
    return Target(name, changed, is_gpu=True)


def running_target(mesh: Mesh) -> Target:
    """Returns the target of a mesh of real devices, also of GPUs that are not in the hardware table."""
    device = mesh.devices.flat[0]
    gpu = by_device_kind(device.device_kind)
    # GPUs that the table does not have are not refused: their programs have a contract, but no predicted time.
    if device.platform not in ("gpu", "cuda") or gpu is None:
        return Target(CPU if device.platform == "cpu" else ATTACHED, None, is_gpu=device.platform != "cpu")
    server = dataclasses.replace(SERVERS[gpu.name], gpus=jax.local_device_count())
    return Target(ATTACHED, server, is_gpu=True)


def attached_server() -> Server:
    """Returns the server of the GPUs that this process sees.

    Raises:
      UserError: there is no GPU, or it is not in the hardware table.
    """
    if not has_gpu():
        raise UserError(
            "--target attached compiles for the GPUs of this machine, and there are none; use h100x8 or cpu"
        )
    use_gpu_memory()
    device = jax.devices()[0]
    gpu = by_device_kind(device.device_kind)
    if gpu is None:
        raise UserError(
            f"the attached {device.device_kind!r} is not in the hardware table; describe it in a .toml file"
        )
    return dataclasses.replace(SERVERS[gpu.name], gpus=jax.local_device_count())


@contextmanager
def judged_by(device: Any) -> Iterator[None]:
    """Lets jax judge what cuDNN's attention supports by the compute capability of this device.

    It asks the attached GPU, and there is none, or another, where programs are compiled for absent ones.
    """
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        yield
        return
    # jax has no parameter for it.
    asked = fused_attention_stablehlo.check_compute_capability
    fused_attention_stablehlo.check_compute_capability = lambda least: _version(capability) >= _version(least)
    try:
        yield
    finally:
        fused_attention_stablehlo.check_compute_capability = asked


def _version(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def compile_only_devices(server: Server, count: int) -> Sequence[Any]:
    """Returns `count` compile-only GPUs, in full servers.

    Raises:
      UserError: the extra `aot` is missing, XLA does not compile for this GPU, or the last server is not full.
    """
    missing = [name for name in (PLUGIN, "nvidia") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"compiling for absent GPUs needs the extra aot: {install_extra('aot')}")
    # XLA's topology has no server with fewer GPUs than the others.
    each = server.each_of(count)
    if not has_gpu() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # else the plugin logs an error about the missing driver
    topology = topologies.get_topology_desc(
        topology_name=server.target,
        platform="cuda",
        # Slices x servers x GPUs.
        topology=f"1x{count // each}x{each}",
        target_config=server.gpu.target_description(),
    )
    return topology.devices
