"""Several GPUs of one machine: what NCCL moves, and one model on the meshes that they form."""

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
from mtjax.errors import UserError
from mtjax.inspect.targets import attached_server
from mtjax.theory.machine import Machine
from mtjax.theory.traffic import Transfer, ring_factor

SIZES = tuple(2**n for n in (16, 20, 24, 28, 30))
"""Bytes: of the array that is summed, of the one that gathering makes, of what is sent."""
TINY_SIZES = (2**12, 2**16)
AXIS = "i"


def collectives(child: Child) -> dict[str, Any]:
    """Seconds and bus bandwidth of each operation and size, as nccl-tests counts it, beside the prediction."""
    ways = len(jax.devices())
    mesh = jax.make_mesh((ways,), (AXIS,))
    found: dict[str, Any] = {"ways": ways, "rows": []}
    machine = _machine()
    for name, operation in OPERATIONS.items():
        for size in TINY_SIZES if child.rehearse else SIZES:
            with jax.set_mesh(mesh):
                seconds = _seconds(operation, mesh, ways, size, one_by_one=child.rehearse)
            sent = size * ring_factor(name, ways)
            row = {"operation": name, "bytes": size, "seconds": seconds, "bus_gb": sent / seconds / 1e9}
            if machine:
                row["predicted"] = machine.transfer(Transfer(AXIS, ways, name, "", 1, size, 1), inside=ways)
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
    ways = lax.axis_size(AXIS)
    return lax.all_gather(x[: x.size // ways], AXIS, tiled=True)


def _reduce_scatter(x: jax.Array) -> jax.Array:
    return lax.psum_scatter(x, AXIS, tiled=True)


def _permute(x: jax.Array) -> jax.Array:
    ways = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(i, (i + 1) % ways) for i in range(ways)])


OPERATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "collective-permute": _permute,
}


def _seconds(
    operation: Callable[[jax.Array], jax.Array], mesh: Any, ways: int, size: int, *, one_by_one: bool
) -> float:
    """Of one operation in which each device has `size` bytes of bfloat16.

    On CPUs collectives block threads, and several that are under way at once would wait for each other: there each is
    waited for.
    """
    send = jax.jit(jax.shard_map(operation, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))
    one = jnp.zeros((ways * size // 2,), jnp.bfloat16)
    array = jax.device_put(one, NamedSharding(mesh, P(AXIS)))
    result: list[Any] = [None]

    def do() -> None:
        result[0] = send(array)
        if one_by_one:
            result[0].block_until_ready()

    return seconds_of(do, lambda: result[0].block_until_ready())["seconds"]


def meshes(child: Child, memory: float) -> dict[str, Any]:
    """The 1.2B model on one GPU and on the meshes of all, as many samples for each data rank; efficiency of one."""
    ways = len(jax.devices())
    shape = SHAPES["gpt2-1.2b"]
    size = 2 if child.rehearse else shape.microbatch[0]
    found: dict[str, Any] = {"ways": ways, "rows": []}
    for mesh, fields in layouts(ways)[: 2 if child.rehearse else None]:
        data = int(mesh.partition("x")[0])
        config = config_of(
            shape, memory, rehearse=child.rehearse, mesh=mesh, global_batch_size=2 * size * data, **fields
        )
        try:
            row = time_run(config, Unheard(child), waits=False)
        except UserError as e:
            row = {"mesh": mesh, "error": str(e)}
        found["rows"].append(row | {"layout": ", ".join(f"{k} {v}" for k, v in fields.items())})
        base = found["rows"][0].get("tflops")
        for done in found["rows"]:
            if base and "tflops" in done:
                done["of_one"] = done["tflops"] / base
        child.answer(found)
    return found


def layouts(ways: int) -> list[tuple[str, dict[str, Any]]]:
    """Meshes of one GPU and of all of them, the most used first."""
    split = {"sequence_parallel": True, "zero": 1}
    both = [(f"{ways // 2}x2", split)] if ways > 2 else []
    return [
        ("1x1", {}),
        (f"{ways}x1", {}),
        (f"{ways}x1", {"zero": 1}),
        (f"1x{ways}", {"sequence_parallel": True}),
        *both,
        (f"{ways}x1", {"zero": 3}),
    ]


class Unheard(Child):
    """A child whose answers are kept by the one around it."""

    def __init__(self, child: Child) -> None:
        super().__init__(child.name, child.folder, child.rehearse)

    def answer(self, found: dict[str, Any]) -> None:
        """Says nothing."""
