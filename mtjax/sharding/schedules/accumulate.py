"""One microbatch after the other, each through the entire model, and the sum of their gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.parameters import Accumulated, differentiable, with_parts, zeros_like_parts
from mtjax.sharding.records import ParameterRecord
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.region import vary_with
from mtjax.sharding.schedules.schedule import LossSum
from mtjax.sharding.zero import materialize_outside_stacks

Tree = Any


@dataclass(frozen=True)
class Accumulate:
    """Every rank has all stages of the model, and adds up the gradients of its microbatches."""

    num_microbatches: int

    def gradients(
        self, loss_sum: LossSum, parameters: Tree, batch: Tree, reduction: Reduction
    ) -> tuple[Array, Tree, Tree]:
        """As `Schedule.gradients` says."""
        records, wrapped = reduction.records, reduction.wrap(parameters)
        parts = differentiable(wrapped)
        microbatches = jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

        def loss_by_parts(parts: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Tree]:
            parameters = self._accumulating(records, with_parts(wrapped, parts), sums)
            return loss_sum(materialize_outside_stacks(records, parameters), microbatch)

        def accumulate(total: tuple[Array, Tree], microbatch: Tree) -> tuple[tuple[Array, Tree], Tree]:
            (loss, report), gradients = jax.value_and_grad(loss_by_parts, has_aux=True)(parts, total[1], microbatch)
            return (total[0] + loss, self._accumulated(records, total[1], gradients)), report

        start = (vary_with(jnp.zeros(()), batch), zeros_like_parts(parts))
        (loss, gradients), reports = lax.scan(accumulate, start, microbatches)
        return loss, jax.tree.map(lambda scalars: scalars.sum(0), reports), gradients

    def _accumulating(self, records: Tree, wrapped: Tree, sums: Tree) -> Tree:
        """Wrapped parameters; some of them add their gradients to `sums` by themselves."""

        def one(record: ParameterRecord, leaf: Any, total: Array) -> Any:
            return Accumulated(leaf, total) if self._adds_up(record) else leaf

        return jax.tree.map(one, records, wrapped, sums)

    def _accumulated(self, records: Tree, sums: Tree, gradients: Tree) -> Tree:
        """The sums with a microbatch's gradients, which `_accumulating` parameters gave."""

        def one(record: ParameterRecord, total: Array, gradient: Array) -> Array:
            return gradient if self._adds_up(record) else total + gradient.astype(jnp.float32)

        return jax.tree.map(one, records, sums, gradients)

    def _adds_up(self, record: ParameterRecord) -> bool:
        """Whether the backward pass adds a gradient to the sum layer by layer, so that no full copy of it exists."""
        return record.is_stacked and self.num_microbatches > 1
