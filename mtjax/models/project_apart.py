"""Fused products of unrolled layers, one by one: with ZeRO-3, which gathers a matrix for each."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from mtjax.models.project import project
from mtjax.models.saved_names import layer_mode
from mtjax.sharding.unstack import can_be_apart


def computes_apart(outputs: Sequence[str | None]) -> bool:
    """Returns whether an unrolled layer computes query, key and value, or gate and up, in a product each: with ZeRO-3,
    which gathers a matrix for each. One product's result would be taken apart, and its gradients concatenated.

    Args:
      outputs: logical names of the fused product's output dimensions.
    """
    return layer_mode.get() == "unrolled, in parts" and can_be_apart(outputs)


def project_apart(
    x: Array,
    weight: Array,
    bias: Array | None,
    outputs: Sequence[str | None],
    sequence: str,
    save_for_backward: bool,
    by_sample: bool,
) -> Array:
    """Computes the parts of a fused product one by one, and stacks them; arguments and result as of `project`."""
    # XLA: consumers that take the parts out again (`jnp.split`, whose gradient is a concatenation) read the products,
    # and nothing is copied.
    parts, inner = outputs[1:], weight.ndim - len(outputs)
    count = weight.shape[inner]

    def each(array: Array, axis: int) -> list[Array]:
        return [part.squeeze(axis) for part in jnp.split(array, count, axis=axis)]

    biases = [None] * count if bias is None else each(bias, 0)
    products = [
        project(x, w, b, parts, sequence, save_for_backward=save_for_backward, by_sample=by_sample)
        for w, b in zip(each(weight, inner), biases, strict=True)
    ]
    joined = [jnp.expand_dims(product, x.ndim - inner) for product in products]
    return jnp.concatenate(joined, axis=x.ndim - inner)
