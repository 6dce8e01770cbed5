"""Batches: the rows that a process loads, and global arrays of them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from mtjax.sharding.axes import dimension_axes
from mtjax.sharding.param_specs import first_dimensions


def process_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """Returns the rows of a global batch on this process' devices, ascending: those that it has to load.

    Args:
      sharding: `batch_sharding`.
      global_batch_size: rows.
    """
    indices = first_dimensions(sharding, 1).addressable_devices_indices_map((global_batch_size,))
    rows = [np.arange(global_batch_size)[index] for index in indices.values() if index is not None]
    # Several devices may have the same rows: tensor, pipeline and context parallel ranks.
    return np.unique(np.concatenate(rows))


def global_batch(
    sharding: NamedSharding, local: Mapping[str, np.ndarray], global_batch_size: int
) -> dict[str, jax.Array]:
    """Assembles global arrays from the rows that each process loaded, without communication.

    With context parallelism, columns are permuted to the order in which ranks have them (zig-zag).

    Args:
      sharding: `batch_sharding`.
      local: arrays [rows of this process, ...].
      global_batch_size: rows of the global arrays.
    """
    # `make_array_from_callback` calls `shard` for this process' devices alone.
    rows, degree = process_rows(sharding, global_batch_size), context_degree(sharding)

    def assemble(array: np.ndarray) -> jax.Array:
        """Assembles [global_batch_size, ...] from this process' rows."""
        if degree > 1 and array.ndim > 1:
            from mtjax.sharding.context.zigzag import token_order

            # A contiguous shard of the permuted columns is a rank's early and late chunk.
            array = array[:, token_order(degree, array.shape[1])]

        def shard(index: Any) -> np.ndarray:
            """Cuts a device's shard out of this process' rows, which are some of the global batch's."""
            start, stop, _ = index[0].indices(global_batch_size)
            # A device's rows are consecutive, and `rows` is ascending, so they are consecutive here too.
            first = int(np.searchsorted(rows, start))
            return array[(slice(first, first + stop - start), *index[1:])]

        array_sharding = first_dimensions(sharding, array.ndim)
        return jax.make_array_from_callback((global_batch_size, *array.shape[1:]), array_sharding, shard)

    return {name: assemble(array) for name, array in local.items()}


def context_degree(sharding: NamedSharding) -> int:
    """Returns the context parallel degree of a batch's sharding."""
    return math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, 1))
