"""Gradients of a global batch: a schedule computes them inside the manual region, a reduction sums them over ranks."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import sum_ranks
from mtjax.sharding.records import places
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.region import Region, vary_with
from mtjax.sharding.schedules.schedule import LossSum, Schedule
from mtjax.sharding.zero import for_use

Tree = Any


def distributed_gradients(
    loss_sum: LossSum, parameters: Tree, batch: Tree, region: Region, schedule: Schedule, reduction: Reduction
) -> tuple[jax.Array, Tree, Tree]:
    """Loss and gradients of a global batch.

    Args:
      loss_sum: differentiated; its weights already divide by the global number of tokens, so sums are means.
      parameters: placed as `stored`.
      batch: arrays [global_batch_size, ...], split over ranks along their first dimension.
      region: in which it runs.
      schedule: the order of microbatches.
      reduction: how gradients are summed.

    Returns:
      The loss, a float32 scalar; the scalars reported with it, summed; and float32 gradients placed as `reduced`.
    """

    def local(parameters: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
        parts = vary_with(parameters, batch)
        loss, report, gradients = schedule.gradients(loss_sum, parts, batch, reduction)
        with jax.named_scope("gradients"):
            return sum_ranks(loss), jax.tree.map(sum_ranks, report), reduction.finish(gradients)

    everywhere = PartitionSpec()
    return region.map(local, parameters, batch, (everywhere, everywhere, places(region.records, "reduced")))


def distributed_sum(function: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, region: Region) -> Tree:
    """The scalars that `function` returns, summed over the ranks' shares of `batch`; nothing is differentiated."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        in_use = for_use(region.records, vary_with(parameters, batch))
        return jax.tree.map(sum_ranks, function(in_use, batch))

    return region.map(local, parameters, batch, PartitionSpec())
