"""Computes a model's output, or its losses without gradients, for a global batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import REPLICATED, psum_varying, varying_axes
from mtjax.sharding.gradients import LossModel, ManualRegion, MicrobatchSchedule, Sums, mark_varying
from mtjax.sharding.rank_values import psum_shards

Tree = Any


def distributed_output(
    model: LossModel,
    parameters: Tree,
    batch: Tree,
    region: ManualRegion,
    schedule: MicrobatchSchedule,
    specs: Tree,
) -> Tree:
    """Computes the last section's output for a global batch, [global_batch_size, ...] arrays sharded as `specs`."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        """Runs on each rank."""
        batch = region.mark_stage_varying(batch)
        output = schedule.final_boundary(model, mark_varying(parameters, batch), batch, region.records)
        return jax.tree.map(lambda a: broadcast_from_rank0(a, region.rules.token_axes), output)

    return region.map(local, batch, specs)(parameters, region.shard_batch(batch))


def distributed_losses(
    model: LossModel, parameters: Tree, batch: Tree, region: ManualRegion, schedule: MicrobatchSchedule
) -> Sums:
    """Computes losses of a global batch, float32 scalars by name, without gradients."""

    def local(parameters: Tree, batch: Tree) -> Sums:
        """Runs on each rank."""
        batch = region.mark_stage_varying(batch)
        losses = schedule.losses(model, mark_varying(parameters, batch), batch, region.records)
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
