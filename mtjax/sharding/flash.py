"""cuDNN's flash attention under explicit sharding: every rank runs the kernel on its own samples and heads."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float

from mtjax.sharding.axes import explicit_axes, spec

Attend = Callable[[Array, Array, Array], Array]
"""(query, key, value) -> the mixed values, each [batch, seq, heads, head_dim]: differentiable, on one device.

For its backward pass it saves, besides these, one array [batch, heads, seq], and perhaps empty ones.
"""
Saved = tuple[Array, Array, Array, Array, Array]
"""Query, key, value, the mixed values, and the array that the kernel adds."""


def cudnn(query: Array, key: Array, value: Array) -> Array:
    """cuDNN's causal attention, in 16 bits, on one GPU."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def flash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    names: tuple[str, str],
    attend: Attend = cudnn,
) -> Float[Array, "batch seq heads head_dim"]:
    """Causal softmax attention that never writes the probabilities out.

    Args:
      query: 16 bits for cuDNN; heads / groups queries in turn share a key and a value head.
      key: as many as values.
      value: what is mixed.
      names: of what is saved for the backward pass: the mixed values, and float32 statistics [batch, heads, seq].
      attend: the kernel.
    """
    kernel = _Kernel(attend, spec("batch", "seq", "heads", "head_dim"), spec("batch", "heads", "seq"), names)
    return _flash(kernel, query, key, value)


class _Kernel(NamedTuple):
    """What `_flash` runs where."""

    attend: Attend
    heads: PartitionSpec
    statistics: PartitionSpec
    names: tuple[str, str]

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Every rank runs `body` on its own samples and heads; inputs of three dimensions are statistics."""

        def mapped(*inputs: Array) -> Any:
            places = tuple(self.heads if a.ndim == 4 else self.statistics for a in inputs)
            return jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=places, out_specs=outputs)(*inputs)

        return mapped


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernel: _Kernel, query: Array, key: Array, value: Array) -> Array:
    return kernel.map(kernel.attend, kernel.heads)(query, key, value)


def _flash_forward(kernel: _Kernel, query: Array, key: Array, value: Array) -> tuple[Array, Saved]:
    """Differentiating through a map inside a manual region does not lower, so the maps are inside the `custom_vjp`."""

    def local(*inputs: Array) -> tuple[Array, Array]:
        out, pull = jax.vjp(kernel.attend, *inputs)
        leaves = jax.tree.leaves(pull)
        return out, leaves[residual_index(leaves, (*inputs, out))]

    arrays = kernel.map(local, (kernel.heads, kernel.statistics))(query, key, value)
    out, own = (checkpoint_name(a, name) for a, name in zip(arrays, kernel.names, strict=True))
    return out, (query, key, value, out, own)


def _flash_backward(kernel: _Kernel, saved: Saved, gradient: Array) -> tuple[Array, Array, Array]:
    """The kernel's own backward pass, with what the forward map has saved in the place of what a second run would.

    Empty arrays, whose placement no `out_specs` can express, come from tracing that run. Nobody reads the rest of it,
    so it is not compiled.
    """

    def local(query: Array, key: Array, value: Array, out: Array, own: Array, gradient: Array) -> tuple[Array, ...]:
        inputs = (query, key, value)
        again, pull = jax.vjp(kernel.attend, *inputs)
        leaves, tree = jax.tree.flatten(pull)
        leaves[residual_index(leaves, (*inputs, again))] = own
        return jax.tree.unflatten(tree, [out if leaf is again else leaf for leaf in leaves])(gradient)

    return kernel.map(local, kernel.heads)(*saved, gradient)


_flash.defvjp(_flash_forward, _flash_backward)


def residual_index(leaves: list[Array], known: tuple[Array, ...]) -> int:
    """The place of what a kernel saves besides what it read and put out."""
    (place,) = (i for i, leaf in enumerate(leaves) if leaf.size and not any(leaf is a for a in known))
    return place
