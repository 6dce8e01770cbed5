"""The working devices of this machine, and the largest mesh for a run that fits them."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from mtjax import config as configs
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.runtime.devices import has_gpu
from mtjax.sharding.processes import visible_gpus

QUERY = ["--query-gpu=index", "--format=csv,noheader"]


def working_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Returns the GPUs that respond, as `CUDA_VISIBLE_DEVICES` names them; None on a machine without GPUs, or where the
    environment hides them.

    A GPU that fell off the bus keeps its file in /dev, and nvidia-smi omits it or names it in an error.
    """
    if not has_gpu(environment):
        return None
    allowed = visible_gpus(environment)
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        return allowed
    try:
        output = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=60).stdout
    # A driver that hangs answers for none of its GPUs.
    except subprocess.TimeoutExpired:
        return []
    answering = [line.strip() for line in output.splitlines() if line.strip().isdigit()]
    if allowed is None:
        return answering
    # Names of MIG devices and UUIDs (GPU-..., MIG-...) are not among nvidia-smi's indices, and are taken as they are.
    return [name for name in allowed if name in answering or not name.isdigit()]


def mesh_within(config: Config, devices: int) -> MeshShape:
    """Returns the run's mesh, or if it has too many devices, the one with the largest smaller data parallel degree that
    divides the batch.

    Raises:
      UserError: no mesh fits.
    """
    wanted = parse_mesh(config.parallel.mesh)
    # Only the data parallel degree becomes smaller: with any other one a device would need more memory.
    for data in range(wanted.data, 0, -1):
        mesh_shape = replace(wanted, data=data)
        if mesh_shape.size <= devices and _divides(config, mesh_shape):
            return mesh_shape
    raise UserError(
        f"mesh {wanted} needs {wanted.size} devices, and there are {devices}; no mesh with a smaller data "
        f"parallel degree fits them and divides global_batch_size {config.training.global_batch_size}"
    )


def _divides(config: Config, mesh_shape: MeshShape) -> bool:
    try:
        check_config(configs.replace(config, mesh=str(mesh_shape)), mesh_shape)
    except UserError:
        return False
    return True
