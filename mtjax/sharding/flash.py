"""cuDNN's flash attention under explicit sharding: every rank runs the kernel on its own samples and heads."""

from functools import partial
from typing import Literal

import jax
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float

from mtjax.sharding.axes import explicit_axes, spec

Implementation = Literal["cudnn", "xla"]
Saved = tuple[Array, Array, Array]


def flash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq heads head_dim"],
    value: Float[Array, "batch seq heads head_dim"],
    implementation: Implementation = "cudnn",
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal softmax attention that never writes the probabilities out.

    Args:
      query: [batch, seq, heads, head_dim], 16 bits for cuDNN.
      key: like query.
      value: like query.
      implementation: "xla" runs the same code path on any device.
    """
    return _flash(spec("batch", "seq", "heads", "head_dim"), implementation, query, key, value)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(place: PartitionSpec, implementation: Implementation, query: Array, key: Array, value: Array) -> Array:
    attend = partial(_attend, implementation)
    mapped = jax.shard_map(attend, axis_names=set(explicit_axes()), in_specs=place, out_specs=place)
    return mapped(query, key, value)


def _flash_forward(
    place: PartitionSpec, implementation: Implementation, query: Array, key: Array, value: Array
) -> tuple[Array, Saved]:
    return _flash(place, implementation, query, key, value), (query, key, value)


def _flash_backward(place: PartitionSpec, implementation: Implementation, saved: Saved, gradient: Array) -> Saved:
    """Runs the kernel forward again for what its backward pass needs: s/(48h) of a recomputed layer's work.

    Differentiating through a map inside a manual region does not lower, so the map is inside the `custom_vjp`, and the
    kernel's own residuals, some of them empty arrays, can't leave it.
    """

    def local(query: Array, key: Array, value: Array, gradient: Array) -> Saved:
        return jax.vjp(partial(_attend, implementation), query, key, value)[1](gradient)

    mapped = jax.shard_map(local, axis_names=set(explicit_axes()), in_specs=place, out_specs=place)
    return mapped(*saved, gradient)


_flash.defvjp(_flash_forward, _flash_backward)


def _attend(implementation: Implementation, query: Array, key: Array, value: Array) -> Array:
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
