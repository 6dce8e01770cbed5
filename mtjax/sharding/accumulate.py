"""Gradient accumulation without pipeline stages: one microbatch after the other, each through the entire model."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from mtjax.sharding.grad_accumulation import add_gradients, with_accumulators
from mtjax.sharding.microbatch_schedule import LossModel, Sums, total_loss
from mtjax.sharding.param_comm import differentiable_shards, with_shards, zeros_like_shards
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.unstack import restack, unstack
from mtjax.sharding.zero import gather_for_inference, gather_for_step, materialize_outside_stacks

Tree = Any


@dataclass(frozen=True)
class Accumulate:
    """Accumulates gradients over microbatches, on ranks that have all layers."""

    num_microbatches: int
    unrolled: bool = False
    """Whether layers are unrolled instead of scanned."""
    compute_dtype: str = "float32"
    """Type of the copy of their matrices that unrolled layers read."""
    is_float8: bool = False
    """Whether layers multiply in 8 bits."""

    def gradients(self, model: LossModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """See `MicrobatchSchedule.gradients`."""
        records, wrapped = reduction.records, reduction.wrap(parameters)
        prepared = self.prepare_parameters(records, wrapped)
        # Differentiated by shards, not by parameters: a gradient has its primal's shape, and that of a reduced one is a
        # shard's.
        shards = differentiable_shards(prepared)
        sums = self._zeros(records, differentiable_shards(wrapped), shards)
        microbatches = self._microbatches(batch)

        def loss(shards: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            """Computes the total loss of a microbatch by the differentiable shards."""
            parameters = with_accumulators(records, with_shards(prepared, shards), sums, self._adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return total_loss(losses), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            """Adds a microbatch's gradients to the accumulators; one iteration of the loop over microbatches."""
            gradients, losses = jax.grad(loss, has_aux=True)(shards, sums, microbatch)
            return add_gradients(records, sums, gradients, self._adds_up), losses

        # One trace for all microbatches; the carry is updated in place.
        gradients, losses = lax.scan(accumulate, sums, microbatches)
        # Weights divide by the counts of the global batch, so that sums over microbatches are means.
        return jax.tree.map(lambda scalars: scalars.sum(0), losses), restack(gradients)

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """See `MicrobatchSchedule.prepare_parameters`."""
        if not self.unrolled:
            return gather_for_step(records, wrapped)
        how = {"dtype": self.compute_dtype, "is_float8": self.is_float8}
        return jax.tree.map(lambda r, leaf: unstack(r, leaf, **how) if r.is_stacked else leaf, records, wrapped)

    def losses(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """See `MicrobatchSchedule.losses`; the batch is one microbatch."""
        return model.loss_sums(gather_for_inference(records, parameters), batch)

    def final_boundary(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """See `MicrobatchSchedule.final_boundary`."""
        used = gather_for_inference(records, parameters)
        if self.num_microbatches == 1:
            return model.final_boundary(used, batch)
        used = gather_for_step(records, used)
        outputs = lax.map(lambda microbatch: model.final_boundary(used, microbatch), self._microbatches(batch))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)

    def _microbatches(self, batch: Tree) -> Tree:
        """Reshapes arrays [samples, ...] to [microbatches, samples of a microbatch, ...]."""
        return jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

    def _zeros(self, records: Tree, stacked: Tree, unstacked: Tree) -> Tree:
        """Builds the gradient accumulators, float32 zeros.

        Args:
          records: of each parameter.
          stacked: differentiable shards, [layers, ...] for those of stacks.
          unstacked: the same, with stacks as layers use them.
        """
        # Matrices are accumulated as they are used, so that XLA fuses the addition into the product. For vectors each
        # addition would be a kernel, so they are accumulated stacked.
        return zeros_like_shards(
            jax.tree.map(lambda r, stack, layers: layers if r.is_matrix else stack, records, stacked, unstacked)
        )

    def _adds_up(self, record: ParamSpec) -> bool:
        """Returns whether the backward pass adds a gradient to its accumulator layer by layer (`AccumulateInto`)."""
        return record.is_stacked and self.num_microbatches > 1 and not self.unrolled
