"""Selects the value of a setting that differs between layers by the layer's number: all layers are one program."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def of_layer(values: Sequence[int], layer: Array | int | None) -> int | Array:
    """Selects a layer's value.

    Args:
      values: of each layer of the model.
      layer: its number; None where all values are equal.

    Returns:
      An int where all layers have the same value, or where the number is known when the program is traced; else the
      selected value, int32 [].
    """
    # A Python number where layers do not differ, so that kernels can specialize, and nothing is indexed.
    if len(set(values)) == 1:
        return values[0]
    assert layer is not None
    return values[layer] if isinstance(layer, int) else jnp.asarray(values, jnp.int32)[layer]
