"""Gradients added up over microbatches: where the backward pass does it by itself, and where the schedule does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.param_comm import AccumulateInto
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.unstack import LayerList, restack

Tree = Any
AddsUp = Callable[[ParamSpec], bool]
"""Whether the backward pass adds a gradient to the sum layer by layer, so that no full copy of it exists."""


def with_accumulators(records: Tree, wrapped: Tree, sums: Tree, adds_up: AddsUp) -> Tree:
    """Wrapped parameters; some of them add their gradients to `sums` by themselves."""

    def one(record: ParamSpec, leaf: Any, total: Array) -> Any:
        return AccumulateInto(leaf, total) if adds_up(record) else leaf

    return jax.tree.map(one, records, wrapped, sums)


def add_gradients(records: Tree, sums: Tree, gradients: Tree, adds_up: AddsUp) -> Tree:
    """The sums with a microbatch's gradients, which `accumulating` parameters gave."""

    def one(record: ParamSpec, total: Any, gradient: Any) -> Any:
        if adds_up(record):
            return gradient
        own = gradient if isinstance(total, LayerList) else restack(gradient)
        return jax.tree.map(lambda total, own: total + own.astype(jnp.float32), total, own)

    return jax.tree.map(one, records, sums, gradients)
