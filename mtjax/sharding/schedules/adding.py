"""Gradients added up over microbatches: where the backward pass does it by itself, and where the schedule does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.parameters import Accumulated
from mtjax.sharding.records import ParameterRecord
from mtjax.sharding.unstacked import Rows, put_together

Tree = Any
AddsUp = Callable[[ParameterRecord], bool]
"""Whether the backward pass adds a gradient to the sum layer by layer, so that no full copy of it exists."""


def accumulating(records: Tree, wrapped: Tree, sums: Tree, adds_up: AddsUp) -> Tree:
    """Wrapped parameters; some of them add their gradients to `sums` by themselves."""

    def one(record: ParameterRecord, leaf: Any, total: Array) -> Any:
        return Accumulated(leaf, total) if adds_up(record) else leaf

    return jax.tree.map(one, records, wrapped, sums)


def accumulated(records: Tree, sums: Tree, gradients: Tree, adds_up: AddsUp) -> Tree:
    """The sums with a microbatch's gradients, which `accumulating` parameters gave."""

    def one(record: ParameterRecord, total: Any, gradient: Any) -> Any:
        if adds_up(record):
            return gradient
        own = gradient if isinstance(total, Rows) else put_together(gradient)
        return jax.tree.map(lambda total, own: total + own.astype(jnp.float32), total, own)

    return jax.tree.map(one, records, sums, gradients)
