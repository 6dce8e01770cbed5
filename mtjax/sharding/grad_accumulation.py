"""Accumulates gradients over microbatches: inside the backward pass, layer by layer, or in the schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.param_comm import AccumulateInto
from mtjax.sharding.param_specs import ParamSpec

Tree = Any
AddsUp = Callable[[ParamSpec], bool]
"""Whether the backward pass adds a gradient to its accumulator layer by layer, so that no full copy of it exists."""


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
        if adds_up(record) and not record.grad_reduction.is_maximum:
            return gradient
        # In float32: sums of many microbatches in bfloat16 would lose the small ones.
        return jax.tree.map(lambda a, g: record.grad_reduction.add(a, g.astype(jnp.float32)), accumulator, gradient)

    return jax.tree.map(one, records, sums, gradients)
