"""Stochastic rounding to bfloat16, and master weights in bfloat16."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.layout.stages import LayerOrder, Orders, order_of
from mtjax.models.threefry import random_bits
from mtjax.sharding.param_specs import ParamSpec

Tree = Any

OF_MASTERS = 1
"""Distinguishes the random bits of master weights from those of moments, which would round the same way otherwise."""


def round_masters(updated: Tree, records: Tree, orders: Orders, seed: int, step: Array) -> Tree:
    """Rounds updated parameters stochastically to the types in which they are stored.

    Args:
      updated: float32, finite where the step counts.
      records: `ParamSpec` of each.
      orders: order of layers in stacked parameters.
      seed: of the run.
      step: number of updates before this one.
    """
    rows = lambda record: rows_of(order_of(record.name, orders))  # noqa: E731
    return jax.tree.map(lambda a, record: round_master(a, record, seed, step, rows(record)), updated, records)


def round_master(array: Array, record: ParamSpec, seed: int, step: Array, rows: Array | None = None) -> Array:
    """Rounds an updated parameter, or some layers of a stack, stochastically to the type in which it is stored.

    Args:
      array: float32, finite where the step counts.
      record: of the parameter.
      seed: of the run.
      step: number of updates before this one.
      rows: numbers of the layers that it stacks; 0, 1, ... when None.
    """
    if record.dtype == "float32":
        return array
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), OF_MASTERS)
    # crc32, as Python's hash of a string differs between processes.
    key = jax.random.fold_in(key, zlib.crc32(record.name.encode()))  # so that it does not depend on other parameters
    return round_stochastically(array, key, record, rows)


def rows_of(order: LayerOrder | None) -> Array | None:
    """Returns the layers' numbers in the order in which they are stacked; None for the model's order."""
    return None if order is None else jnp.asarray(np.maximum(order.flat, 0), jnp.int32)


def round_stochastically(array: Array, key: Array, record: ParamSpec, rows: Array | None = None) -> Array:
    """Rounds to one of the two nearest numbers, each with the probability that makes the mean exact.

    Args:
      array: float32, finite, sharded as the parameter is stored.
      key: a Threefry key, for this array and step.
      record: of the parameter; the random bits depend on the key and an element's index, on every mesh the same.
      rows: numbers of the layers that it stacks; 0, 1, ... when None.
    """
    bits = random_bits(key, array.shape, record.storage_spec, rows)
    # Carries into the upper 16 bits, which are bfloat16's, with a probability of the lower 16 over 2^16.
    carried = jax.lax.bitcast_convert_type(array, jnp.uint32) + (bits >> 16)
    upper = carried & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)
