"""Computes gradients of a global batch: a schedule inside the manual region, then a reduction over ranks."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mtjax.sharding.accumulate import LossModel, MicrobatchSchedule, Sums
from mtjax.sharding.axes import psum_varying
from mtjax.sharding.manual_region import ManualRegion, mark_varying
from mtjax.sharding.param_specs import partition_specs, trained
from mtjax.sharding.reduction import Reduction

Tree = Any


def distributed_gradients(
    model: LossModel,
    parameters: Tree,
    batch: Tree,
    region: ManualRegion,
    schedule: MicrobatchSchedule,
    reduction: Reduction,
) -> tuple[Sums, Tree]:
    """Computes losses and gradients of a global batch.

    Args:
      model: differentiated; the weights of its losses already divide by global counts, so sums are means.
      parameters: sharded as `storage_spec`.
      batch: arrays [global_batch_size, ...], sharded along their first dimension.
      region: in which it runs.
      schedule: the order of microbatches.
      reduction: how gradients of the trainable parameters are reduced.

    Returns:
      The losses by name, float32 scalars; and float32 gradients of their sum, sharded as `storage_spec`, of the
      trainable parameters.
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
    return region.map(local, batch, results)(parameters, region.shard_batch(batch))


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
