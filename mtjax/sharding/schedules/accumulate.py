"""One microbatch after the other, each through the entire model, and the sum of their gradients."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from mtjax.sharding.param_comm import differentiable_shards, with_shards, zeros_like_shards
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.schedules.grad_accumulation import add_gradients, with_accumulators
from mtjax.sharding.schedules.microbatch_schedule import PipelineModel, Sums, total_loss
from mtjax.sharding.unstack import restack, unstack
from mtjax.sharding.zero import gather_for_inference, gather_for_step, materialize_outside_stacks

Tree = Any


@dataclass(frozen=True)
class Accumulate:
    """Every rank has the entire model, and adds up the gradients of its microbatches."""

    num_microbatches: int
    unrolled: bool = False
    """Whether layers are differentiated one after the other, without a loop over them."""
    compute_dtype: str = "float32"
    """In which their matrices are kept then, beside the parameters."""

    def gradients(self, model: PipelineModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """As `Schedule.gradients` says."""
        records, wrapped = reduction.records, reduction.wrap(parameters)
        apart = self.unstack_parameters(records, wrapped)
        sums = self._zeros(records, differentiable_shards(wrapped), differentiable_shards(apart))
        wrapped, parts = apart, differentiable_shards(apart)
        microbatches = self._microbatches(batch)

        def loss_by_parts(parts: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            parameters = with_accumulators(records, with_shards(wrapped, parts), sums, self._adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return total_loss(losses), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            gradients, losses = jax.grad(loss_by_parts, has_aux=True)(parts, sums, microbatch)
            return add_gradients(records, sums, gradients, self._adds_up), losses

        gradients, losses = lax.scan(accumulate, sums, microbatches)
        return jax.tree.map(lambda scalars: scalars.sum(0), losses), restack(gradients)

    def unstack_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """As `Schedule.apart` says."""
        if not self.unrolled:
            return gather_for_step(records, wrapped)
        one = lambda record, leaf: unstack(record, leaf, self.compute_dtype) if record.is_stacked else leaf  # noqa: E731
        return jax.tree.map(one, records, wrapped)

    def losses(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """As `Schedule.losses` says; the batch is one microbatch."""
        return model.loss_sums(gather_for_inference(records, parameters), batch)

    def final_boundary(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """As `Schedule.output` says."""
        used = gather_for_inference(records, parameters)
        if self.num_microbatches == 1:
            return model.final_boundary(used, batch)
        used = gather_for_step(records, used)
        outputs = lax.map(lambda microbatch: model.final_boundary(used, microbatch), self._microbatches(batch))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)

    def _microbatches(self, batch: Tree) -> Tree:
        """Arrays [microbatches, samples, ...] of those that are [samples, ...]."""
        return jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

    def _zeros(self, records: Tree, stacked: Tree, apart: Tree) -> Tree:
        """Zeros to which gradients are added: of matrices as they are used, so that products add; of vectors stacked,
        as each addition would be an operation of its own.
        """
        return zeros_like_shards(
            jax.tree.map(lambda r, whole, rows: rows if r.is_matrix else whole, records, stacked, apart)
        )

    def _adds_up(self, record: ParamSpec) -> bool:
        return record.is_stacked and self.num_microbatches > 1 and not self.unrolled
