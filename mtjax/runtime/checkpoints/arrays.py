"""Reads and writes a checkpoint's arrays: with Orbax, or one by one, with their layers in another order."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint._src.serialization import jax_array_handlers
from orbax.checkpoint.type_handlers import ArrayHandler, ParamInfo, RestoreArgs

from mtjax.layout.stages import PADDING, LayerOrder, Orders, order_of
from mtjax.sharding.param_specs import dotted
from mtjax.storage import key_value_store, url_of

T = TypeVar("T")


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns a handler for trees of `jax.Array` only."""
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _FinishingHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


class _FinishingHandler(ArrayHandler):
    """Waits for all reads that it has started before it reports that one has failed.

    Orbax reads all arrays concurrently and closes its event loop as soon as one read raises. The other reads would stay
    suspended until the garbage collector destroys them, and print an error each. They are awaited and not cancelled,
    because TensorStore's threads would report to the loop even then.
    """

    async def deserialize(
        self, infos: Sequence[ParamInfo], args: Sequence[RestoreArgs] | None = None
    ) -> Sequence[jax.Array]:
        return await finishing(super().deserialize(infos, args))


async def finishing(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine; if it raises, waits first for all tasks that it has started."""
    before = asyncio.all_tasks()
    try:
        return await work
    except Exception:
        # Repeated, as tasks that are awaited may start others.
        while begun := asyncio.all_tasks() - before:
            await asyncio.wait(begun)
        raise


_write = jax_array_handlers._async_serialize_replica_slices


async def _write_to_the_end(*args: Any, **named: Any) -> Any:
    return await finishing(_write(*args, **named))


# Orbax: writing is not a method that can be overridden. TensorStore prints an error for each write that outlives it.
jax_array_handlers._async_serialize_replica_slices = _write_to_the_end


def open_array(state: Path, name: str, order: LayerOrder | None = None) -> ts.TensorStore:
    """Opens an array of a checkpoint for reading by slices, with its layers in the model's order.

    Args:
      state: the folder of the arrays.
      name: dotted name.
      order: order in which its layers were stacked when saved.
    """
    store = ts.open(_spec(state, name), read=True).result()
    if order is None:
        return store
    position = {number: i for i, number in enumerate(order.flat)}
    # A view: indices are resolved when a slice is read. Padding, whose number is -1, is left out.
    return store[[position[number] for number in range(1 + max(order.flat))]]


def place_array(store: ts.TensorStore, target: jax.ShapeDtypeStruct, order: LayerOrder | None = None) -> jax.Array:
    """Builds an array on its devices, each of which reads only its shard.

    Args:
      store: the array, with its layers in the model's order.
      target: shape, type and sharding.
      order: order in which layers are to be stacked; zeros where a stage has no layer.
    """
    # Index the stored layers in the wanted order; a padding row (-1) reads layer 0, and is zeroed below.
    numbers = None if order is None else np.asarray(order.flat)
    view = store if numbers is None else store[np.maximum(numbers, 0).tolist()]
    read: dict[str, np.ndarray] = {}  # replicas on several devices are read once

    def read_shard(index: Any) -> np.ndarray:
        key = str(index)
        if key not in read:
            array = np.array(view[index].read().result(), target.dtype)
            if numbers is not None:
                array[numbers[index[0]] == PADDING] = 0
            read[key] = array
        return read[key]

    return jax.make_array_from_callback(target.shape, target.sharding, read_shard)


def read_reordered(state: Path, abstract: Any, saved: Orders, wanted: Orders) -> Any:
    """Reads a tree of arrays whose layers are stacked in an order other than that in which they were saved."""

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = dotted(path)
        return place_array(open_array(state, name, order_of(name, saved)), leaf, order_of(name, wanted))

    return jax.tree_util.tree_map_with_path(one, abstract)


def _spec(state: Path, name: str) -> dict[str, Any]:
    if url_of(state):  # the format of `checkpoints.remote`
        return {"driver": "zarr3", "kvstore": key_value_store(state / name)}
    metadata = state / "_METADATA"
    zarr3 = metadata.is_file() and json.loads(metadata.read_text()).get("use_zarr3", False)
    if (state / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": f"{state.resolve().as_uri()}/", "path": f"{name}/"}
    else:
        kvstore = {"driver": "file", "path": f"{state.resolve()}/{name}/"}
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": kvstore}
