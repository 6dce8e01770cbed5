"""What must be true of the devices before a run's parameters are allocated."""

import math

import jax

from mtjax.config.sizes import GATED
from mtjax.data.cache import machine_memory
from mtjax.errors import UserError
from mtjax.layout.plan import Plan
from mtjax.train.step import TrainStep


def check_devices(program: TrainStep) -> None:
    """Checks that the devices have the memory for a run, and run its steps as it wants them.

    Raises:
      UserError: they don't.
    """
    check_memory(program)
    check_comparable(program)
    check_products(program)


def check_memory(program: TrainStep) -> None:
    """Checks that parameters and optimizer state fit the memory of this process's devices, before they are allocated.

    Raises:
      UserError: they do not fit.
    """
    devices = jax.local_devices()
    leaves = jax.tree.leaves(program.abstract_state)
    bytes_per_device = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)
    if devices[0].platform == "cpu":
        # Virtual devices share the machine's memory.
        sharing_devices, memory = len(devices), machine_memory()
    else:
        sharing_devices, memory = 1, (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
    if bytes_per_device * sharing_devices > memory:
        raise UserError(
            f"parameters and optimizer state need {bytes_per_device * sharing_devices / 1e9:,.1f} GB of memory, and "
            f"{memory / 1e9:,.1f} GB are available: use a smaller model or more devices (mtjax plan --gpus N finds "
            "a mesh)"
        )


def check_comparable(program: TrainStep) -> None:
    """Checks that steps are deterministic if the run is to compare them bit by bit.

    Raises:
      UserError: they are not deterministic.
    """
    training, platform = program.config.training, program.mesh.devices.flat[0].platform
    if training.check_replicas and platform != "cpu" and not training.deterministic:
        raise UserError(
            "check_replicas compares steps bit by bit, and operations on GPUs are not deterministic by default: "
            "add --deterministic"
        )


def check_products(program: TrainStep) -> None:
    """Checks that XLA can run the products of the step.

    Raises:
      UserError: it can't on CPUs.
    """
    # XLA: for CPUs it compiles the float32 gradient of gate and up from 16-bit operands where tensor parallel ranks
    # have parts of both, and the process ends when the product runs.
    run, platform = program.config, program.mesh.devices.flat[0].platform
    gated = run.parallel.zero == 3 and run.model.activation in GATED
    shared = gated and Plan.of(run, program.mesh_shape).tensor_degree > 1
    if platform == "cpu" and run.training.unroll_layers and shared and run.training.compute_dtype != "float32":
        raise UserError(
            f"on CPUs, --unroll-layers with --zero 3, --activation {run.model.activation} and tensor parallelism needs "
            f"--compute-dtype float32, not {run.training.compute_dtype}: set it, or leave --unroll-layers out"
        )
