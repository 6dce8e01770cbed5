"""Arrays of which some processes have nothing left: their parts come from other processes that hold the same ones."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, auto_axes

from mtjax.sharding.placement import holders

Array = Any
"""`jax.Array`, or `jax.ShapeDtypeStruct` with a sharding."""


def have_all(arrays: Sequence[Array], processes: Collection[int]) -> bool:
    """Whether these processes have every part of every array between them."""
    return all(
        any(array.sharding.mesh.devices.flat[place].process_index in processes for place in places)
        for array in arrays
        for places in holders(array)
    )


def restore_missing(array: Array, part: Callable[[Any], np.ndarray], processes: Collection[int]) -> jax.Array:
    """An array on its devices, of which only some processes can read parts. All processes call it.

    One device of each part's holders gives it, all others give zeros, and their sum - of bits, as whole numbers - over
    the mesh axes that don't split the array is the array, to the bit.

    Args:
      array: shape, type of 4 bytes and sharding.
      part: reads the part at an index, in the processes that can.
      processes: those that can; `have_all` holds of them.
    """
    sharding = array.sharding
    split = {axis for entry in sharding.spec for axis in ([entry] if isinstance(entry, str) else entry or ())}
    rest = tuple(axis for axis in sharding.mesh.axis_names if axis not in split)
    copies = math.prod(sharding.mesh.shape[axis] for axis in rest)
    stacked = NamedSharding(sharding.mesh, PartitionSpec(rest or None, *sharding.spec))
    givers: dict[str, int] = {}
    for device, index in stacked.devices_indices_map((copies, *array.shape)).items():
        if device.process_index in processes:
            key, copy = str(index[1:]), index[0].start or 0
            givers[key] = min(copy, givers.get(key, copy))

    def bits(index: Any) -> np.ndarray:
        shape = stacked.shard_shape((copies, *array.shape))
        if givers[str(index[1:])] != (index[0].start or 0):
            return np.zeros(shape, np.uint32)
        return np.ascontiguousarray(part(index[1:])).view(np.uint32).reshape(shape)

    given = jax.make_array_from_callback((copies, *array.shape), stacked, bits)
    with jax.set_mesh(sharding.mesh):
        return _summed(given, np.dtype(array.dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2))
def _summed(given: jax.Array, dtype: np.dtype, sharding: NamedSharding) -> Any:
    def add(given: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(given.sum(axis=0, dtype=jnp.uint32), dtype)

    return auto_axes(add, out_sharding=sharding.spec)(given)
