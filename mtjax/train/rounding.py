"""Stochastic rounding to bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.layout.stages import LayerOrder
from mtjax.models.threefry import random_bits
from mtjax.sharding.param_specs import ParamSpec


def round_stochastically(array: Array, key: Array, record: ParamSpec, order: LayerOrder | None = None) -> Array:
    """Rounds to one of the two nearest numbers, each with the probability that makes the mean exact.

    Args:
      array: float32, finite, sharded as the parameter is stored.
      key: a Threefry key, for this array and step.
      record: of the parameter; the random bits depend on the key and an element's index, on every mesh the same.
      order: order in which its layers are stacked; None for the model's order.
    """
    rows = None if order is None else jnp.asarray(np.maximum(order.flat, 0), jnp.int32)
    bits = random_bits(key, array.shape, record.storage_spec, rows)
    # Carries into the upper 16 bits, which are bfloat16's, with a probability of the lower 16 over 2^16.
    carried = jax.lax.bitcast_convert_type(array, jnp.uint32) + (bits >> 16)
    upper = carried & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(upper, jnp.float32).astype(jnp.bfloat16)
