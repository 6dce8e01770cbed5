"""One microbatch after the other, each through the entire model, and the sum of their gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.parameters import differentiable, with_parts, zeros_like_parts
from mtjax.sharding.records import ParameterRecord
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.schedules.adding import accumulated, accumulating
from mtjax.sharding.schedules.schedule import CutModel, Sums
from mtjax.sharding.zero import for_use, materialize_outside_stacks

Tree = Any


@dataclass(frozen=True)
class Accumulate:
    """Every rank has the entire model, and adds up the gradients of its microbatches."""

    num_microbatches: int

    def gradients(self, model: CutModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """As `Schedule.gradients` says."""
        records, wrapped = reduction.records, reduction.wrap(parameters)
        parts = differentiable(wrapped)
        microbatches = jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

        def loss_by_parts(parts: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            parameters = accumulating(records, with_parts(wrapped, parts), sums, self._adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return sum(losses.values(), start=jnp.zeros(())), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            gradients, losses = jax.grad(loss_by_parts, has_aux=True)(parts, sums, microbatch)
            return accumulated(records, sums, gradients, self._adds_up), losses

        gradients, losses = lax.scan(accumulate, zeros_like_parts(parts), microbatches)
        return jax.tree.map(lambda scalars: scalars.sum(0), losses), gradients

    def losses(self, model: CutModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """As `Schedule.losses` says; the batch is one microbatch."""
        return model.loss_sums(for_use(records, parameters), batch)

    def _adds_up(self, record: ParameterRecord) -> bool:
        return record.is_stacked and self.num_microbatches > 1
