"""Computes gradients of a global batch: a schedule inside the manual region, then a reduction over ranks.

Without pipeline stages the schedule is gradient accumulation: one microbatch after the other, each through the entire
model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import psum_varying
from mtjax.sharding.grad_accumulation import add_gradients, with_accumulators, zeros_like_shards
from mtjax.sharding.manual_region import ManualRegion, mark_varying
from mtjax.sharding.param_comm import differentiable_shards, with_shards
from mtjax.sharding.param_specs import ParamSpec, partition_specs, trained
from mtjax.sharding.zero import Reduction, gather_for_inference, gather_for_step, materialize_outside_stacks

if TYPE_CHECKING:
    from mtjax.sharding.pipeline.executor import PipelineSchedule

Tree = Any
Sums = dict[str, Array]
"""By name: weighted sums of losses, float32 scalars; and counters such as the tokens of each expert, float32 arrays."""


def total_loss(sums: Sums) -> Array:
    """Adds up the losses, without the counters: the value that is minimised."""
    # Losses are scalars; counters, such as the tokens of each expert, are arrays.
    return sum((value for value in sums.values() if not value.ndim), start=jnp.zeros(()))


class LossModel(Protocol):
    """A model as a function of its parameters, on ranks that have all layers."""

    def with_frozen(self, frozen: Tree) -> "LossModel":
        """Returns the model as a function of its other parameters; `frozen` has a part of their tree."""
        ...

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """Computes the losses of a microbatch."""
        ...

    def final_boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Computes the hidden states behind the last layer."""
        ...


MicrobatchSchedule: TypeAlias = "Accumulate | PipelineSchedule"
"""The order in which a rank works through microbatches and chunks of layers; runs inside a `ManualRegion`."""


@dataclass(frozen=True)
class Accumulate:
    """Accumulates gradients over microbatches, on ranks that have all layers."""

    num_microbatches: int

    def gradients(self, model: LossModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """Computes losses and gradients of this rank's samples.

        Args:
          model: differentiated.
          parameters: this rank's shards, varying over the axes over which the batch does.
          batch: arrays [samples, ...], this rank's.
          reduction: which gradients are reduced inside the backward pass; the caller reduces the others.

        Returns:
          The losses, and the float32 gradients of their sum, both summed over microbatches.
        """
        records, wrapped = reduction.records, reduction.wrap(parameters)
        prepared = self.prepare_parameters(records, wrapped)
        # Differentiated by shards, not by parameters: a gradient has its primal's shape, and that of a reduced one is a
        # shard's.
        shards = differentiable_shards(prepared)
        sums = self.zeros(records, wrapped, shards)
        microbatches = self._microbatches(batch)

        def loss(shards: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            """Computes the total loss of a microbatch by the differentiable shards."""
            parameters = with_accumulators(records, with_shards(prepared, shards), sums, self.adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return total_loss(losses), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            """Adds a microbatch's gradients to the accumulators; one iteration of the loop over microbatches."""
            gradients, losses = jax.grad(loss, has_aux=True)(shards, sums, microbatch)
            return self.add(records, sums, gradients), losses

        # One trace for all microbatches; the carry is updated in place.
        gradients, losses = lax.scan(accumulate, sums, microbatches)
        # Weights divide by the counts of the global batch, so that sums over microbatches are means.
        return jax.tree.map(lambda scalars: scalars.sum(0), losses), gradients

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """Prepares parameters for layers, once per step: gathers those of ZeRO-1 and 2."""
        return gather_for_step(records, wrapped)

    def losses(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """Computes the losses alone, from this rank's parameters, sharded as `storage_spec`; one microbatch."""
        return model.loss_sums(gather_for_inference(records, parameters), batch)

    def final_boundary(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """Computes the hidden states behind the last layer."""
        used = gather_for_inference(records, parameters)
        if self.num_microbatches == 1:
            return model.final_boundary(used, batch)
        used = gather_for_step(records, used)
        outputs = lax.map(lambda microbatch: model.final_boundary(used, microbatch), self._microbatches(batch))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)

    def _microbatches(self, batch: Tree) -> Tree:
        """Reshapes arrays [samples, ...] to [microbatches, samples of a microbatch, ...]."""
        return jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

    def zeros(self, records: Tree, wrapped: Tree, shards: Tree) -> Tree:
        """Builds the gradient accumulators of parameters as `Reduction.wrap` returns them, and as layers use them."""
        return zeros_like_shards(shards)

    def add(self, records: Tree, sums: Tree, gradients: Tree) -> Tree:
        """Adds a microbatch's gradients to the accumulators."""
        return add_gradients(records, sums, gradients, self.adds_up)

    def adds_up(self, record: ParamSpec) -> bool:
        """Returns whether the backward pass adds a gradient to its accumulator layer by layer (`AccumulateInto`)."""
        return record.is_stacked and self.num_microbatches > 1


def distributed_gradients(
    model: LossModel, batch: Tree, region: ManualRegion, schedule: MicrobatchSchedule, reduction: Reduction
) -> Callable[[Tree, Tree], tuple[Sums, Tree]]:
    """Returns the function that computes losses and gradients of a global batch.

    Args:
      model: differentiated; the weights of its losses already divide by global counts, so sums are means.
      batch: a sharded batch, or arrays like it; only shapes are read.
      region: in which it runs.
      schedule: the order of microbatches.
      reduction: how gradients of the trainable parameters are reduced.

    Returns:
      (parameters sharded as `storage_spec`, the result of `region.shard_batch`) -> the losses by name, float32 scalars;
      and float32 gradients of their sum, sharded as `storage_spec`, of the trainable parameters.
    """
    records = region.records

    def local(parameters: Tree, batch: Tree) -> tuple[Sums, Tree]:
        """Runs on each rank: its shards of the parameters and of the batch -> losses and reduced gradients."""
        # What varies over an axis has a gradient that is local to each rank along it.
        batch = region.mark_stage_varying(batch)
        parameters = mark_varying(parameters, batch)
        of_trained, own = model, trained(records, parameters)
        if own is not parameters:
            # Frozen parameters are bound to the model, so that what follows sees trained ones alone.
            from mtjax.sharding.trainable import bind_frozen

            of_trained = bind_frozen(model, records, parameters, schedule)
        losses, gradients = schedule.gradients(of_trained, own, batch, reduction)
        # Losses are sums with global weights: their all-reduce over all ranks is the global mean.
        with jax.named_scope("gradients"):
            return jax.tree.map(psum_varying, losses), reduction.finish(gradients)

    results = PartitionSpec(), partition_specs(trained(records, records), "storage_spec")
    return region.map(local, batch, results)


def distributed_losses(
    model: LossModel, parameters: Tree, batch: Tree, region: ManualRegion, schedule: MicrobatchSchedule
) -> Sums:
    """Computes losses of a global batch, float32 scalars by name, without gradients."""

    def local(parameters: Tree, batch: Tree) -> Sums:
        """Runs on each rank."""
        batch = region.mark_stage_varying(batch)
        losses = schedule.losses(model, mark_varying(parameters, batch), batch, region.records)
        return jax.tree.map(psum_varying, losses)

    return region.map(local, batch, PartitionSpec())(parameters, region.shard_batch(batch))
