"""cuDNN's flash attention under explicit sharding: every rank runs the kernel on its samples and heads."""

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
"""(query, key, value) -> output, each [batch, seq, heads, head_dim]: differentiable, on one device.

Its residuals are these four arrays, one array [batch, heads, seq], and perhaps empty arrays.
"""
Saved = tuple[Array, Array, Array, Array, Array]
"""Query, key, value, output, and the kernel's statistics."""


def cudnn(query: Array, key: Array, value: Array, *, scale: float | None = None) -> Array:
    """Runs cuDNN's causal attention, in 16 bits, on one GPU; `scale` of the scores is head_dim^-0.5 when None."""
    return jax.nn.dot_product_attention(query, key, value, scale=scale, is_causal=True, implementation="cudnn")


def flash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    names: tuple[str, str],
    attend: Attend = cudnn,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes causal softmax attention without materializing the probabilities.

    Args:
      query: 16 bits for cuDNN; heads / groups consecutive query heads share a key and a value head.
      key: keys.
      value: values.
      names: of the arrays saved for the backward pass: the output, and float32 statistics [batch, heads, seq].
      attend: the kernel.
    """
    kernel = _Kernel(attend, spec("batch", "seq", "heads", "head_dim"), spec("batch", "heads", "seq"), names)
    return _flash(kernel, query, key, value)


class _Kernel(NamedTuple):
    """Static arguments of `_flash`: the kernel and shardings."""

    attend: Attend
    heads: PartitionSpec
    statistics: PartitionSpec
    names: tuple[str, str]

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Maps `body` over the shards of its arguments; those of three dimensions are statistics."""

        def mapped(*inputs: Array) -> Any:
            specs = tuple(self.heads if a.ndim == 4 else self.statistics for a in inputs)
            return jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=specs, out_specs=outputs)(*inputs)

        return mapped


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(kernel: _Kernel, query: Array, key: Array, value: Array) -> Array:
    return kernel.map(kernel.attend, kernel.heads)(query, key, value)


def _flash_forward(kernel: _Kernel, query: Array, key: Array, value: Array) -> tuple[Array, Saved]:
    """Runs the kernel; its residuals leave the map as outputs."""

    # Autodiff of a `shard_map` inside the manual region does not lower, so the maps are inside the `custom_vjp`.
    def local(*inputs: Array) -> tuple[Array, Array]:
        out, vjp = jax.vjp(kernel.attend, *inputs)
        residuals = jax.tree.leaves(vjp)
        return out, residuals[residual_index(residuals, (*inputs, out))]

    arrays = kernel.map(local, (kernel.heads, kernel.statistics))(query, key, value)
    out, statistics = (checkpoint_name(a, name) for a, name in zip(arrays, kernel.names, strict=True))
    return out, (query, key, value, out, statistics)


def _flash_backward(kernel: _Kernel, saved: Saved, gradient: Array) -> tuple[Array, Array, Array]:
    """Runs the kernel's backward pass with the saved output and statistics.

    Args:
      kernel: static arguments.
      saved: query, key, value and output [batch, seq, heads, head_dim], and statistics [batch, heads, seq].
      gradient: of the output.

    Returns:
      Gradients of query, key and value.
    """

    def local(
        query: Array, key: Array, value: Array, out: Array, statistics: Array, gradient: Array
    ) -> tuple[Array, ...]:
        """Runs on one rank's samples and heads, inside the map."""
        inputs = (query, key, value)
        # Traces the forward kernel once more for the structure of its vjp function and for empty residuals, whose
        # sharding no `out_specs` can express. The saved arrays replace its results, so it is not compiled.
        recomputed, vjp = jax.vjp(kernel.attend, *inputs)
        leaves, tree = jax.tree.flatten(vjp)
        leaves[residual_index(leaves, (*inputs, recomputed))] = statistics
        return jax.tree.unflatten(tree, [out if leaf is recomputed else leaf for leaf in leaves])(gradient)

    return kernel.map(local, kernel.heads)(*saved, gradient)


_flash.defvjp(_flash_forward, _flash_backward)


def residual_index(leaves: list[Array], known: tuple[Array, ...]) -> int:
    """Finds the one residual of a kernel that is neither empty nor among its inputs and outputs, `known`."""
    (index,) = (i for i, leaf in enumerate(leaves) if leaf.size and not any(leaf is a for a in known))
    return index
