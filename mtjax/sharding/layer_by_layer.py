"""Stacks gathered or scattered one layer after the other, so that buffers of one layer suffice."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import layout as memory_layout
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mtjax.sharding.parameters import GradientSum, sum_gradient


def gather_layers(parts: list[Array], totals: list[GradientSum], into: list[Array]) -> list[Array]:
    """Stacked arrays with each layer of `into` overwritten by the same layer of `parts`, gathered over ranks.

    Args:
      parts: arrays of which each rank has a part.
      totals: along which dimension of each array, `layers` included, and over which axes.
      into: arrays of the gathered shapes, replicated over these ranks.
    """

    def local(parts: list[Array], into: list[Array]) -> list[Array]:
        def one(number: Array, whole: list[Array]) -> list[Array]:
            layer = [lax.dynamic_index_in_dim(a, number, keepdims=False) for a in parts]
            return [lax.dynamic_update_index_in_dim(w, a, number, 0) for w, a in zip(whole, gather(layer), strict=True)]

        return lax.fori_loop(0, parts[0].shape[0], one, into)

    def gather(layer: list[Array]) -> list[Array]:
        pairs = zip(layer, totals, strict=True)
        return [_row_major(lax.all_gather(a, total.parts, axis=total.dim - 1, tiled=True)) for a, total in pairs]

    def places(arrays: list[Array]) -> list[PartitionSpec]:
        return [jax.typeof(a).sharding.spec for a in arrays]

    mapped = jax.shard_map(local, in_specs=(places(parts), places(into)), out_specs=places(into), check_vma=False)
    return mapped(parts, into)


def scatter_layers(whole: list[Array], totals: list[GradientSum], places: list[PartitionSpec]) -> list[Array]:
    """Stacked gradients summed over ranks, one layer after the other: each rank's part of the sums.

    The stacks of parts begin as copies of the first layer's: XLA would lay out zeros, which wait for nothing, at the
    beginning of the step, and keep them through its fullest moment.

    Args:
      whole: gradients of each rank's own samples.
      totals: over which axes, and which dimension is split, `layers` included.
      places: how they are split otherwise.
    """

    def summed(number: ArrayLike) -> list[Array]:
        layer = [lax.dynamic_index_in_dim(a, number, keepdims=False) for a in whole]
        rows = zip(layer, places, totals, strict=True)
        return [sum_gradient(a, PartitionSpec(*place[1:]), replace(t, dim=t.dim - 1)) for a, place, t in rows]

    def one(number: Array, parts: list[Array]) -> list[Array]:
        return [lax.dynamic_update_index_in_dim(p, a, number, 0) for p, a in zip(parts, summed(number), strict=True)]

    layers = whole[0].shape[0]
    return lax.fori_loop(1, layers, one, [jnp.broadcast_to(a, (layers, *a.shape)) for a in summed(0)])


def _row_major(x: Array) -> Array:
    """`x` with its last dimension innermost; else a gather's layout spreads to the array into which it is written.

    Only where every axis is manual: otherwise the partitioner would gather all of `x` for the constraint.
    """
    return memory_layout.with_layout_constraint(x, memory_layout.Layout(major_to_minor=tuple(range(x.ndim))))
