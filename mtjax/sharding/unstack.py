"""Stacks of parameters taken apart, an array for each layer: for layers that run one after the other without a loop.

A loop over layers writes what each keeps for its backward pass into stacks, and copies it out of them again. Without a
loop every array is where it was made. Stacks of parameters stay what they are between steps: they are taken apart
once, before the first microbatch, matrices in the compute type, so that no microbatch casts them again.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.param_comm import GatherOnUse, NoGrad, ReduceGradOnUse, materialize
from mtjax.sharding.param_specs import ParamSpec

Tree = Any
T = TypeVar("T")


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclass(frozen=True)
class LayerList:
    """A stack's parameter, layer by layer."""

    layers: tuple[Any, ...]
    """Of each layer an array, or what stands for one: `mtjax.sharding.param_comm`."""


def unstack(record: ParamSpec, stack: Any, dtype: str) -> LayerList:
    """A stack of arrays, or of what stands for them, layer by layer; matrices in `dtype`, as products take them."""

    def row(stack: Any, i: int) -> Array:
        layer = jax.tree.map(lambda array: jax.lax.index_in_dim(array, i, keepdims=False), stack)
        if isinstance(layer, GatherOnUse):
            return materialize(layer)  # pyright: ignore[reportReturnType]
        return layer.astype(dtype) if record.is_matrix else layer

    def layer(i: int) -> Any:
        if isinstance(stack, NoGrad):
            return NoGrad(row(stack.parameter, i))
        if isinstance(stack, ReduceGradOnUse):
            part = jax.lax.index_in_dim(stack.shard, i, keepdims=False)
            return replace(stack, array=row(stack.array, i), shard=part)
        if isinstance(stack, GatherOnUse) and stack.keep_for_backward:
            own = replace(stack, shard=jax.lax.index_in_dim(stack.shard, i, keepdims=False))
            return own.with_gathered(row(stack, i))
        return row(stack, i)

    with jax.named_scope("parameters"):
        return LayerList(tuple(layer(i) for i in range(record.shape[0])))


def restack(tree: Tree) -> Tree:
    """A tree of gradients in which those of parameters that were taken apart are stacked again."""

    def one(leaf: Any) -> Any:
        if not _is_rows(leaf):
            return leaf
        with jax.named_scope("gradients"):
            return jnp.stack(leaf.layers)

    return jax.tree.map(one, tree, is_leaf=_is_rows)


def unstacked_layers(layers: T) -> list[T] | None:
    """The parameters of each layer, where they have been taken apart; None where they are stacked."""
    rows = [leaf for leaf in jax.tree.leaves(layers, is_leaf=_is_rows) if _is_rows(leaf)]
    if not rows:
        return None
    return [
        jax.tree.map(lambda leaf, i=i: leaf.layers[i], layers, is_leaf=_is_rows) for i in range(len(rows[0].layers))
    ]


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, LayerList)
