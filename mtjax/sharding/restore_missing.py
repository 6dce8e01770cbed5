"""Restores arrays whose shards some processes have lost, from processes with replicas of these shards."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, auto_axes

from mtjax.sharding.replicas import holders

Array = Any
"""`jax.Array`, or `jax.ShapeDtypeStruct` with a sharding."""


def have_all(arrays: Sequence[Array], processes: Collection[int]) -> bool:
    """Returns whether these processes together have every shard of every array."""
    return all(
        any(array.sharding.mesh.devices.flat[index].process_index in processes for index in indices)
        for array in arrays
        for indices in holders(array)
    )


def restore_missing(array: Array, read: Callable[[Any], np.ndarray], processes: Collection[int]) -> jax.Array:
    """Builds an array on its devices, of which only some processes can read shards. All processes call it.

    Args:
      array: shape, type of 4 or 2 bytes and sharding.
      read: reads the shard at an index, in the processes that can.
      processes: those that can; `have_all` holds of them.
    """
    sharding = array.sharding
    sharded = {axis for entry in sharding.spec for axis in ([entry] if isinstance(entry, str) else entry or ())}
    replicated = tuple(axis for axis in sharding.mesh.axis_names if axis not in sharded)
    replicas = math.prod(sharding.mesh.shape[axis] for axis in replicated)
    # [replicas, ...]: for each shard, one replica is the owner and contributes it, all other replicas contribute zeros.
    # Their sum, of the bits as unsigned integers, is the array, bit for bit.
    stacked = NamedSharding(sharding.mesh, PartitionSpec(replicated or None, *sharding.spec))
    owners: dict[str, int] = {}
    for device, index in stacked.devices_indices_map((replicas, *array.shape)).items():
        if device.process_index in processes:
            key, replica = str(index[1:]), index[0].start or 0
            # All processes compute the same table, so exactly one contributes each shard.
            owners[key] = min(replica, owners.get(key, replica))

    def bits(index: Any) -> np.ndarray:
        """Reads the bits of a shard, [1, ...]; zeros in all replicas but the one that is the owner."""
        shape = stacked.shard_shape((replicas, *array.shape))
        kind = bits_of(array.dtype)
        if owners[str(index[1:])] != (index[0].start or 0):
            return np.zeros(shape, kind)
        return np.ascontiguousarray(read(index[1:])).view(kind).reshape(shape)

    # `make_array_from_callback` asks this process for its own devices' shards alone.
    contributed = jax.make_array_from_callback((replicas, *array.shape), stacked, bits)
    with jax.set_mesh(sharding.mesh):
        return _summed(contributed, np.dtype(array.dtype), sharding)


@partial(jax.jit, static_argnums=(1, 2))
def _summed(bits: jax.Array, dtype: np.dtype, sharding: NamedSharding) -> Any:
    """Sums bits [replicas, ...], unsigned integers, over replicas, and casts them to `dtype`."""

    def add(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits.sum(axis=0, dtype=bits.dtype), dtype)

    return auto_axes(add, out_sharding=sharding.spec)(bits)


def bits_of(dtype: np.dtype) -> type[np.unsignedinteger]:
    """Returns the unsigned integers of as many bytes, 4 or 2."""
    return np.uint32 if np.dtype(dtype).itemsize == 4 else np.uint16
