"""Unstacks parameters, [layers, ...], into an array per layer, for layers that are unrolled instead of scanned.

A `lax.scan` over layers copies each layer's residuals into stacked arrays, and out of them in the backward pass.
Unrolled layers save no copies. Between steps parameters stay stacked: they are unstacked once per step, before the
first microbatch, matrices in the compute type, so that they are cast once per step.
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
    """An unstacked parameter."""

    layers: tuple[Any, ...]
    """An array of each layer, or a wrapped parameter of `mtjax.sharding.param_comm`."""


def unstack(record: ParamSpec, stack: Any, dtype: str) -> LayerList:
    """Unstacks a parameter.

    Args:
      record: of the parameter.
      stack: [layers, ...], an array or a wrapped parameter.
      dtype: compute type, to which matrices are cast.
    """

    def take(stack: Any, i: int) -> Array:
        """Takes layer i out of an array or a `GatherOnUse`, gathered or cast."""
        layer = jax.tree.map(lambda array: jax.lax.index_in_dim(array, i, keepdims=False), stack)
        if isinstance(layer, GatherOnUse) and record.is_gathered_per_step:
            # ZeRO-1 and 2: gathered here, once per step. ZeRO-3's are gathered by each pass of a layer.
            return materialize(layer)  # pyright: ignore[reportReturnType]
        if isinstance(layer, GatherOnUse):
            return layer
        return layer.astype(dtype) if record.is_matrix else layer

    def layer(i: int) -> Any:
        """Unstacks layer i, with its wrapper."""
        if isinstance(stack, NoGrad):
            return NoGrad(take(stack.parameter, i))
        # Each layer's gradient is reduced, or cast, as soon as its backward pass has computed it.
        if isinstance(stack, ReduceGradOnUse):
            shard = jax.lax.index_in_dim(stack.shard, i, keepdims=False)
            return replace(stack, array=take(stack.array, i), shard=shard)
        # The full array is read by the layer; the shard receives the reduce-scattered gradient.
        if isinstance(stack, GatherOnUse) and stack.keep_for_backward:
            taken = replace(stack, shard=jax.lax.index_in_dim(stack.shard, i, keepdims=False))
            return taken.with_gathered(take(stack, i))
        return take(stack, i)

    with jax.named_scope("parameters"):
        return LayerList(tuple(layer(i) for i in range(record.shape[0])))


def restack(tree: Tree) -> Tree:
    """Stacks the gradients of unstacked parameters: `LayerList` -> [layers, ...]; other gradients are unchanged."""

    def one(leaf: Any) -> Any:
        if not _is_layer_list(leaf):
            return leaf
        with jax.named_scope("gradients"):
            return jnp.stack(leaf.layers)

    return jax.tree.map(one, tree, is_leaf=_is_layer_list)


def unstacked_layers(layers: T) -> list[T] | None:
    """Returns the parameters of each layer if they are unstacked; None if they are stacked."""
    lists = [leaf for leaf in jax.tree.leaves(layers, is_leaf=_is_layer_list) if _is_layer_list(leaf)]
    if not lists:
        return None
    return [
        jax.tree.map(lambda leaf, i=i: leaf.layers[i], layers, is_leaf=_is_layer_list)
        for i in range(len(lists[0].layers))
    ]


def _is_layer_list(leaf: Any) -> bool:
    return isinstance(leaf, LayerList)
