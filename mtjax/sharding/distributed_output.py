"""Computes a model's output, or its losses without gradients, for a global batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import REPLICATED, psum_varying, varying_axes
from mtjax.sharding.gradients import LossFunction, LossSums, ManualRegion, MicrobatchSchedule, in_microbatches
from mtjax.sharding.rank_values import psum_shards
from mtjax.sharding.zero import gather_for_inference, gather_for_step

Tree = Any


OfRank = Callable[[Tree, Tree, Tree], Tree]
"""(a rank's parameters, sharded as `storage_spec`; its samples; the records of the parameters) -> its output."""


def distributed_output(output_of: OfRank, parameters: Tree, batch: Tree, region: ManualRegion, specs: Tree) -> Tree:
    """Computes an output for a global batch, [global_batch_size, ...] arrays sharded as `specs`."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        """Runs on each rank."""
        output = output_of(*region.mark_varying(parameters, batch), region.records)
        return jax.tree.map(lambda a: broadcast_from_rank0(a, region.rules.token_axes), output)

    return region.map(local, batch, specs)(parameters, region.shard_batch(batch))


def by_microbatches(run: Callable[[Tree, Tree], Tree], count: int) -> OfRank:
    """Returns the function that runs a model, a function of parameters and samples, on one microbatch after another."""

    def output_of(parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """Gathers the parameters, once for all microbatches, and joins the outputs."""
        used = gather_for_inference(records, parameters)
        if count == 1:
            return run(used, batch)
        used = gather_for_step(records, used)
        outputs = lax.map(partial(run, used), in_microbatches(batch, count))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)

    return output_of


def distributed_losses(
    loss_function: LossFunction, parameters: Tree, batch: Tree, region: ManualRegion, schedule: MicrobatchSchedule
) -> LossSums:
    """Computes losses of a global batch, float32 scalars by name, without gradients."""

    def local(parameters: Tree, batch: Tree) -> LossSums:
        """Runs on each rank."""
        losses = schedule.losses(loss_function, *region.mark_varying(parameters, batch), region.records)
        return jax.tree.map(psum_varying, losses)

    return region.map(local, batch, REPLICATED)(parameters, region.shard_batch(batch))


def broadcast_from_rank0(x: jax.Array, besides: Axes) -> jax.Array:
    """Broadcasts the first rank's `x` over the axes over which it varies, except those in `besides`.

    The values are equal already, but their type does not express it: `x` is typed as varying over these axes.
    """
    axes = tuple(axis for axis in varying_axes(x) if axis not in besides)
    if not axes:
        return x
    # A masked all-reduce, whose result `shard_map` types as equal on all ranks.
    is_first = sum(lax.axis_index(axis) for axis in axes) == 0
    return psum_shards(jnp.where(is_first, x, 0), axes)
