"""Gathers and reduce-scatters stacked parameters one layer after the other, so that buffers of one layer suffice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import layout as memory_layout
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mtjax.sharding.axes import fully_manual, spec
from mtjax.sharding.param_comm import GradReduction, ShardedParam, index_layer, is_wrapped, reduce_gradient

Tree = Any


def gather_layers(stacks: list[ShardedParam]) -> list[Array]:
    """All-gathers stacked parameters, which are sharded within layers, one layer after the other.

    Args:
      stacks: shards, [layers, ...] each; all of the same number of layers.

    Returns:
      The gathered stacks, in their `gather_dtype`.
    """

    def layer(number: ArrayLike) -> list[Array]:
        with jax.named_scope("parameters"):
            return [gather_layer(index_layer(stack, number)) for stack in stacks]

    return _layer_by_layer(layer, len(stacks[0].shard))


def gather_upfront(layers: Tree) -> Tree:
    """Gathers the parameters that are gathered once for both passes, for a loop without prefetch.

    Args:
      layers: parameters, [layers, ...]; the `ShardedParam` among them are shards.

    Returns:
      The same tree, with each `ShardedParam` that has `keep_for_backward` gathered.
    """
    leaves, tree = jax.tree.flatten(layers, is_leaf=is_wrapped)
    gathered_once = {
        i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, ShardedParam) and leaf.keep_for_backward
    }
    if gathered_once:
        arrays = gather_layers([lax.stop_gradient(leaf) for leaf in gathered_once.values()])
        for (i, leaf), array in zip(gathered_once.items(), arrays, strict=True):
            leaves[i] = leaf.with_gathered(array)
    return jax.tree.unflatten(tree, leaves)


def gather_layer(like: ShardedParam) -> Array:
    """All-gathers one layer's parameter, in row-major memory layout.

    Args:
      like: its shard, without the leading `layers`.
    """

    def local(a: Array) -> Array:
        """Gathers with all axes manual."""
        full = lax.all_gather(
            a.astype(like.gather_dtype), like.reduction.shard_axes, axis=like.reduction.dim, tiled=True
        )
        # XLA: a gather's result has the sharded dimension outermost. That layout would spread to the stack into which
        # it is written, and the stack would be copied once more to be transposed.
        row_major = memory_layout.Layout(major_to_minor=tuple(range(full.ndim)))
        return memory_layout.with_layout_constraint(full, row_major)

    # XLA: a layout constraint on an operand with explicit axes makes the partitioner gather it, so all are manual.
    return fully_manual(local, spec(*like.names))(like.sent)


def scatter_layers(gradients: list[Array], reductions: list[GradReduction], specs: list[PartitionSpec]) -> list[Array]:
    """Reduce-scatters stacked gradients one layer after the other.

    Args:
      gradients: [layers, ...] each, local to a rank's samples.
      reductions: of each, `layers` counted among the dimensions.
      specs: sharding of each before the reduction.

    Returns:
      This rank's shards of the reduced gradients, float32 [layers, ...].
    """

    def reduce_layer(index: ArrayLike) -> list[Array]:
        of_layer = zip(index_layer(gradients, index), specs, reductions, strict=True)
        return [reduce_gradient(a, PartitionSpec(*spec[1:]), replace(r, dim=r.dim - 1)) for a, spec, r in of_layer]

    return _layer_by_layer(reduce_layer, gradients[0].shape[0])


def _layer_by_layer(compute: Callable[[ArrayLike], list[Array]], count: int) -> list[Array]:
    """Stacks the results of `compute(index)` for `count` layers, computed one after the other."""

    def one(index: Array, stacks: list[Array]) -> list[Array]:
        return [lax.dynamic_update_index_in_dim(s, a, index, 0) for s, a in zip(stacks, compute(index), strict=True)]

    # XLA: zeros depend on nothing, so they would be allocated at the beginning of the step and be alive through its
    # memory peak. The stacks begin as copies of the first layer's result instead.
    return lax.fori_loop(1, count, one, [jnp.broadcast_to(a, (count, *a.shape)) for a in compute(0)])
