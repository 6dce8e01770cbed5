"""Accumulates gradients over microbatches: inside the backward pass, layer by layer, or in the schedule.

A loop over layers carries the stack of parameters unchanged; the cotangent of that carry is the accumulator, to which
each iteration of the backward loop adds the gradients of its layer in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.axes import varying_like
from mtjax.sharding.param_comm import differentiable_shards, with_shards
from mtjax.sharding.param_specs import ParamSpec

Tree = Any
T = TypeVar("T")
AddsUp = Callable[[ParamSpec], bool]
"""Whether the backward pass adds a gradient to its accumulator layer by layer, so that no full copy of it exists."""


@partial(jax.tree_util.register_dataclass, data_fields=["parameter", "accumulator"], meta_fields=[])
@dataclass(frozen=True)
class AccumulateInto:
    """A stack's parameter whose gradient is `accumulator` plus this microbatch's gradient."""

    parameter: Any
    """An array, or one of the above."""
    accumulator: Any
    """The sum of earlier microbatches' gradients, float32."""


def zeros_like_shards(shards: Tree) -> Tree:
    """Builds float32 accumulators in the shapes of `shards`."""
    # They are a loop's carry, whose type says over which axes it varies: those of the gradients that are added.
    return jax.tree.map(lambda p: varying_like(jnp.zeros_like(p, jnp.float32), p), shards)


def with_accumulators(records: Tree, wrapped: Tree, sums: Tree, adds_up: AddsUp) -> Tree:
    """Wraps parameters in `AccumulateInto` where `adds_up`: their gradients come out added to `sums`."""

    def one(record: ParamSpec, leaf: Any, accumulator: Array) -> Any:
        if not adds_up(record):
            return leaf
        return AccumulateInto(leaf, jnp.zeros_like(accumulator) if record.grad_reduction.is_maximum else accumulator)

    return jax.tree.map(one, records, wrapped, sums)


def add_gradients(records: Tree, sums: Tree, gradients: Tree, adds_up: AddsUp) -> Tree:
    """Adds a microbatch's gradients to the accumulators.

    Args:
      records: of each parameter.
      sums: accumulators, float32.
      gradients: with respect to parameters of `with_accumulators`, with the same `sums`.
      adds_up: the same predicate; these gradients contain the sum already.
    """

    def one(record: ParamSpec, accumulator: Any, gradient: Any) -> Any:
        """Adds a parameter's gradient to its sum, unless the backward pass has added it."""
        if adds_up(record) and not record.grad_reduction.is_maximum:
            return gradient
        # In float32: sums of many microbatches in bfloat16 would lose the small ones.
        add = jnp.maximum if record.grad_reduction.is_maximum else jnp.add
        return jax.tree.map(lambda a, g: add(a, g.astype(jnp.float32)), accumulator, gradient)

    return jax.tree.map(one, records, sums, gradients)


# --- in loops over layers


def split_accumulators(layers: T) -> tuple[T, list[Array] | None]:
    """Separates a stack's parameters from their gradient accumulators.

    Args:
      layers: parameters, [layers, ...]; some are `AccumulateInto`.

    Returns:
      The parameters, and the accumulators in their order; None where there are none.
    """
    # `AccumulateInto` reaches the model as a parameter, and is unwrapped here, before the loop over layers.
    is_leaf = lambda x: isinstance(x, AccumulateInto)  # noqa: E731
    sums = [leaf.accumulator for leaf in jax.tree.leaves(layers, is_leaf=is_leaf) if is_leaf(leaf)]
    plain = jax.tree.map(lambda leaf: leaf.parameter if is_leaf(leaf) else leaf, layers, is_leaf=is_leaf)
    return plain, sums or None


def accumulate_grads_into(layer: T, stack: list[Array], index: Array) -> tuple[T, list[Array]]:
    """Returns both unchanged; in the backward pass, adds the layer's gradients to the cotangents of `stack`.

    Args:
      layer: parameters of one layer.
      stack: the `differentiable_shards` of all layers, each [layers, ...], in the same order.
      index: the layer's position in the stack.
    """
    # The layer itself was indexed from a copy without gradient, so its gradient goes nowhere else.
    shards, tree = jax.tree.flatten(differentiable_shards(layer))
    shards, stack = _tie(shards, stack, index)
    return with_shards(layer, jax.tree.unflatten(tree, shards)), stack


@jax.custom_vjp
def _tie(shards: list[Array], stack: list[Array], index: Array) -> tuple[list[Array], list[Array]]:
    """Returns `shards` and `stack`; their cotangents are added up into those of `stack`, at `index`."""
    return shards, stack


def _tie_forward(shards: list[Array], stack: list[Array], index: Array) -> tuple[Any, Array]:
    return (shards, stack), index


def _tie_backward(index: Array, gradients: tuple[list[Array], list[Array]]) -> tuple[None, list[Array], None]:
    """Adds the layer's gradients [...] to the accumulators [layers, ...] at `index`."""
    of_layer, sums = gradients
    return (
        None,
        [add_to_layer(accumulator, grad, index) for accumulator, grad in zip(sums, of_layer, strict=True)],
        None,
    )


_tie.defvjp(_tie_forward, _tie_backward)


def add_to_layer(stack: Array, value: Array, index: Any) -> Array:
    """Adds `value` [...] to one layer of a stack [layers, ...]; `index` is from 0."""
    # XLA: one kernel reads and writes the layer only if both have the same index, without arithmetic for indices below
    # 0, and if the layer is not reshaped between; else the layer is copied before.
    before = lax.dynamic_slice_in_dim(stack, index, 1, allow_negative_indices=False)
    return lax.dynamic_update_slice_in_dim(stack, before + value[None], index, 0, allow_negative_indices=False)


@jax.custom_vjp
def seed_cotangents(sums: Tree, x: Array, stack: Tree) -> Array:
    """Returns `x`; in the backward pass, the cotangents of `stack` begin as `sums` instead of zeros.

    Args:
      sums: gradient accumulators, float32, in the shapes of `stack`.
      x: hidden states behind the last layer.
      stack: what the loop over layers carried unchanged; nothing else may read it.
    """
    return x


def _seed_forward(sums: Tree, x: Array, stack: Tree) -> tuple[Array, Tree]:
    return x, sums


def _seed_backward(sums: Tree, gradient: Array) -> tuple[None, Array, Tree]:
    """Passes the gradient of `x` on; the cotangents of the stack, [layers, ...] each, begin as `sums`."""
    return None, gradient, sums


seed_cotangents.defvjp(_seed_forward, _seed_backward)
