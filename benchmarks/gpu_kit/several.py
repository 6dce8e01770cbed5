"""Multiple GPUs of one machine: NCCL bandwidth, and one model on different meshes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gpu_kit.child import Child
from gpu_kit.clock import seconds_of
from gpu_kit.shapes import SHAPES, config_of
from gpu_kit.speed import time_run
from mtjax.analysis.machine import Machine
from mtjax.analysis.traffic import Transfer, ring_factor
from mtjax.errors import UserError
from mtjax.inspect.targets import attached_server

SIZES = tuple(2**n for n in (16, 20, 24, 28, 30))
"""Bytes of the array that is reduced or sent, or that an all-gather returns."""
TINY_SIZES = (2**12, 2**16)
AXIS = "i"


def collectives(child: Child) -> dict[str, Any]:
    """Returns seconds and bus bandwidth (as defined by nccl-tests) of each operation and size, and the prediction."""
    gpus = len(jax.devices())
    mesh = jax.make_mesh((gpus,), (AXIS,))
    found: dict[str, Any] = {"ways": gpus, "rows": []}
    machine = _machine()
    for name, operation in OPERATIONS.items():
        for size in TINY_SIZES if child.rehearse else SIZES:
            with jax.set_mesh(mesh):
                seconds = _seconds(operation, mesh, gpus, size, one_by_one=child.rehearse)
            sent = size * ring_factor(name, gpus)
            row = {"operation": name, "bytes": size, "seconds": seconds, "bus_gb": sent / seconds / 1e9}
            if machine:
                row["predicted"] = machine.transfer(Transfer(AXIS, gpus, name, "", 1, size, 1), inside=gpus)
            found["rows"].append(row)
            child.answer(found)
    return found


def _machine() -> Machine | None:
    try:
        return Machine(attached_server())
    except UserError:
        return None


def _all_reduce(x: jax.Array) -> jax.Array:
    return lax.psum(x, AXIS)


def _all_gather(x: jax.Array) -> jax.Array:
    degree = lax.axis_size(AXIS)
    return lax.all_gather(x[: x.size // degree], AXIS, tiled=True)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return lax.psum_scatter(x, AXIS, tiled=True)


def _permute(x: jax.Array) -> jax.Array:
    degree = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(i, (i + 1) % degree) for i in range(degree)])


OPERATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "collective-permute": _permute,
}


def _seconds(
    operation: Callable[[jax.Array], jax.Array], mesh: Any, gpus: int, size: int, *, one_by_one: bool
) -> float:
    """Times an operation on `size` bytes of bfloat16 per device."""
    # XLA: on CPUs collectives block threads, and concurrent ones can deadlock, so each is waited for (`one_by_one`).
    send = jax.jit(jax.shard_map(operation, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    one = jnp.zeros((gpus * size // 2,), jnp.bfloat16)
    array = jax.device_put(one, NamedSharding(mesh, P(AXIS)))
    result: list[Any] = [None]

    def do() -> None:
        result[0] = send(array)
        if one_by_one:
            result[0].block_until_ready()

    return seconds_of(do, lambda: result[0].block_until_ready())["seconds"]


def meshes(child: Child, memory: float) -> dict[str, Any]:
    """Times the 1.2B model on one GPU and on meshes of all, with as many samples per data parallel rank."""
    gpus = len(jax.devices())
    shape = SHAPES["gpt2-1.2b"]
    size = 2 if child.rehearse else shape.microbatch[0]
    found: dict[str, Any] = {"ways": gpus, "rows": []}
    for mesh, fields in layouts(gpus)[: 2 if child.rehearse else None]:
        data = int(mesh.partition("x")[0])
        config = config_of(
            shape, memory, rehearse=child.rehearse, mesh=mesh, global_batch_size=2 * size * data, **fields
        )
        try:
            row = time_run(config, SilentChild(child), waits=False)
        except UserError as e:
            row = {"mesh": mesh, "error": str(e)}
        found["rows"].append(row | {"layout": ", ".join(f"{k} {v}" for k, v in fields.items())})
        base = found["rows"][0].get("tflops")
        for done in found["rows"]:
            if base and "tflops" in done:
                done["of_one"] = done["tflops"] / base
        child.answer(found)
    return found


def layouts(gpus: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns meshes and settings for one GPU and for all, the most common first."""
    settings = {"sequence_parallel": True, "zero": 1}
    both = [(f"{gpus // 2}x2", settings)] if gpus > 2 else []
    return [
        ("1x1", {}),
        (f"{gpus}x1", {}),
        (f"{gpus}x1", {"zero": 1}),
        (f"1x{gpus}", {"sequence_parallel": True}),
        *both,
        (f"{gpus}x1", {"zero": 3}),
    ]


class SilentChild(Child):
    """A child whose results the caller writes."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name, child.folder, child.rehearse)

    def answer(self, found: dict[str, Any]) -> None:
        """Writes nothing."""
