"""Gradients of a global batch: a schedule computes them inside the manual region, a reduction sums them over ranks."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import of_first_rank, sum_ranks
from mtjax.sharding.frozen import WithFrozen, learnt
from mtjax.sharding.records import places
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.region import Region, vary_with
from mtjax.sharding.schedules.schedule import CutModel, Schedule, Sums

Tree = Any


def distributed_gradients(
    model: CutModel, parameters: Tree, batch: Tree, region: Region, schedule: Schedule, reduction: Reduction
) -> tuple[Sums, Tree]:
    """Losses and gradients of a global batch.

    Args:
      model: differentiated; the weights of its losses already divide by global numbers, so sums are means.
      parameters: placed as `stored`.
      batch: arrays [global_batch_size, ...], split over ranks along their first dimension.
      region: in which it runs.
      schedule: the order of microbatches.
      reduction: how gradients of the trained parameters are summed.

    Returns:
      The losses by name, float32 scalars; and float32 gradients of their sum, placed as `stored`, of the parameters
      that are trained.
    """
    records = region.records

    def local(parameters: Tree, batch: Tree) -> tuple[Sums, Tree]:
        batch = region.on_stages(batch)
        parameters = vary_with(parameters, batch)
        whole = WithFrozen.of(model, records, parameters, schedule)
        losses, gradients = schedule.gradients(whole, learnt(records, parameters), batch, reduction)
        with jax.named_scope("gradients"):
            return jax.tree.map(sum_ranks, losses), reduction.finish(gradients)

    return region.map(local, parameters, batch, (PartitionSpec(), places(learnt(records, records), "stored")))


def distributed_losses(model: CutModel, parameters: Tree, batch: Tree, region: Region, schedule: Schedule) -> Sums:
    """Losses of a global batch, as above; nothing is differentiated."""

    def local(parameters: Tree, batch: Tree) -> Sums:
        batch = region.on_stages(batch)
        losses = schedule.losses(model, vary_with(parameters, batch), batch, region.records)
        return jax.tree.map(sum_ranks, losses)

    return region.map(local, parameters, batch, PartitionSpec())


def distributed_output(
    model: CutModel, parameters: Tree, batch: Tree, region: Region, schedule: Schedule, places: Tree
) -> Tree:
    """What the last section puts out, placed as `places` says; nothing is differentiated."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        batch = region.on_stages(batch)
        wire = schedule.output(model, vary_with(parameters, batch), batch, region.records)
        return jax.tree.map(lambda a: of_first_rank(a, region.rules.shared_work), wire)

    return region.map(local, parameters, batch, places)
