"""Stacks gathered or scattered one layer after the other, so that buffers of one layer suffice."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import layout as memory_layout
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mtjax.sharding.axes import fully_manual, spec
from mtjax.sharding.param_comm import GatherOnUse, GradReduction, index_layer, reduce_gradient


def gather_layers(stacks: list[GatherOnUse]) -> list[Array]:
    """Stacked parameters, of whose layers ranks have parts, gathered one layer after the other."""

    def layer(number: ArrayLike) -> list[Array]:
        with jax.named_scope("parameters"):
            return [gather_layer(index_layer(stack, number)) for stack in stacks]

    return _layer_by_layer(layer, len(stacks[0].shard))


def gather_layer(like: GatherOnUse) -> Array:
    """A layer's parameter with its last dimension innermost: else the layout of a gather, with the split dimension
    outermost, spreads to the stack into which it is written, of which XLA then makes another copy.

    The constraint needs every axis manual: otherwise the partitioner would gather all of its operand.
    """

    def local(a: Array) -> Array:
        whole = lax.all_gather(
            a.astype(like.gather_dtype), like.reduction.shard_axes, axis=like.reduction.dim, tiled=True
        )
        row_major = memory_layout.Layout(major_to_minor=tuple(range(whole.ndim)))
        return memory_layout.with_layout_constraint(whole, row_major)

    return fully_manual(local, spec(*like.names))(like.shard)


def scatter_layers(whole: list[Array], totals: list[GradReduction], places: list[PartitionSpec]) -> list[Array]:
    """Stacked gradients summed over ranks, one layer after the other: each rank's part of the sums.

    Args:
      whole: gradients of each rank's own samples.
      totals: over which axes, and which dimension is split, `layers` included.
      places: how they are split otherwise.
    """

    def summed(number: ArrayLike) -> list[Array]:
        rows = zip(index_layer(whole, number), places, totals, strict=True)
        return [reduce_gradient(a, PartitionSpec(*place[1:]), replace(t, dim=t.dim - 1)) for a, place, t in rows]

    return _layer_by_layer(summed, whole[0].shape[0])


def _layer_by_layer(make: Callable[[ArrayLike], list[Array]], count: int) -> list[Array]:
    """Stacks of what `make` makes of the number of a layer.

    They begin as copies of the first layer's: XLA would lay out zeros, which wait for nothing, at the beginning of the
    step, and keep them through its fullest moment.
    """

    def one(number: Array, stacks: list[Array]) -> list[Array]:
        return [lax.dynamic_update_index_in_dim(s, a, number, 0) for s, a in zip(stacks, make(number), strict=True)]

    return lax.fori_loop(1, count, one, [jnp.broadcast_to(a, (count, *a.shape)) for a in make(0)])
