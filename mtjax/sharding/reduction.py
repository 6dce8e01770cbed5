"""Decides over which ranks each gradient is reduced, and when.

A gradient is reduced over the mesh axes that replicate its parameter, in the type of `grad_reduce_dtype`. Usually that
happens once per step, after the last microbatch. It happens inside the backward pass, layer by layer, where the
remaining backward pass can overlap it (a single microbatch), and where full gradients must never exist (ZeRO-2 and 3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.layout.layouts import NOT_SHARDED
from mtjax.sharding.axes import explicit_only, spec, varying_axes
from mtjax.sharding.param_comm import GradReduction, ReplicatedParam, ShardedParam, reduce_gradient
from mtjax.sharding.param_specs import ParamSpec, sharded_stacks
from mtjax.sharding.stacked_collectives import scatter_layers
from mtjax.sharding.zero import gather_and_keep, gather_on_use, wrap_for_step

Tree = Any

NO_REDUCTION = GradReduction((), NOT_SHARDED, (), 1)
"""Reduces over no axis; the gradient is still cast to float32."""


@dataclass(frozen=True)
class Reduction:
    """The reduction of one step's gradients."""

    records: Tree
    """The `ParamSpec` of each parameter."""
    zero: int
    """ZeRO's stage."""
    num_microbatches: int
    """Of the step."""
    stages: int = 1
    """Of the pipeline. With several stages the backward pass runs once per tick of the timetable, idle ticks included,
    so a reduction inside it would run too often."""

    def wrap(self, parameters: Tree) -> Tree:
        """Wraps parameters for differentiation: some gather themselves, or reduce their gradients, where they are used.

        Each parameter becomes one of:

        - `ShardedParam` without `keep_for_backward`: ZeRO-3. All-gathered for each use, its gradient reduce-scattered.
        - `ShardedParam` with `keep_for_backward`: ZeRO-1 and 2 in a step of one microbatch, where the loop over layers
          overlaps the gather (`mtjax.sharding.prefetch`); gathered once for both passes.
        - `ShardedParam`, perhaps inside a `ReplicatedParam`: layers' matrices of ZeRO-1 and 2 in steps of several
          microbatches. `zero.gather_for_step` gathers them, once per step.
        - `ReplicatedParam`: replicated, its gradient reduced in the backward pass (`is_reduced_in_backward`), or only
          cast to float32.
        - itself: a float32 array whose gradient `finish` reduces.

        Args:
          parameters: sharded as `storage_spec`, and varying over the axes over which the batch does.
        """

        def one(record: ParamSpec, array: Array) -> Any:
            """Wraps one parameter."""
            # ZeRO-3.
            if record.gather_dtype is not None and not record.is_gathered_per_step:
                return gather_on_use(record, array)
            # ZeRO-1 and 2, one microbatch: the gather is overlapped with the layers before.
            if (
                record.is_gathered_per_step
                and record.is_sharded_within_layers
                and self.num_microbatches == self.stages == 1
            ):
                return gather_and_keep(record, array)
            # Otherwise ZeRO-1 and 2 gather once per step, for all microbatches. Without ZeRO: the parameter itself.
            full = wrap_for_step(record, array) if record.is_gathered_per_step else array
            # Master weights in the compute type: outside stacks consumers read float32, as of float32 ones.
            dtype = None if record.is_stacked or record.dtype == "float32" else "float32"
            if self.is_reduced_in_backward(record):
                # Autodiff gives a cotangent the shape of its primal. The reduced gradient has the shape of a shard, so
                # the function is differentiated by zeros of that shape, not by the parameter.
                zeros = zeros_like_reduced(array.shape, array, record, record.grad_reduction)
                return ReplicatedParam(full, zeros, spec(*record.layer_axes), record.layer_grad_reduction, dtype)
            if isinstance(full, ShardedParam) or full.dtype != jnp.float32:
                # Reduced after the last microbatch, but accumulated in float32: the gradient has the full shape.
                shape = [
                    n * record.grad_reduction.num_shards if i == record.grad_reduction.dim else n
                    for i, n in enumerate(array.shape)
                ]
                return ReplicatedParam(
                    full,
                    zeros_like_reduced(shape, array, record, NO_REDUCTION),
                    spec(*record.layer_axes),
                    NO_REDUCTION,
                    dtype,
                )
            return full

        return jax.tree.map(one, self.records, parameters)

    def is_reduced_in_backward(self, record: ParamSpec) -> bool:
        """Returns whether a gradient is reduced over ranks inside the backward pass of each microbatch."""
        # ZeRO-2 and 3 accumulate shards, so each microbatch's gradients are reduce-scattered. Otherwise gradients are
        # accumulated locally and reduced once, except where one microbatch allows to overlap the reduction.
        if self.zero >= 2 and not record.is_of_every_tick:
            return record.is_zero_sharded
        inside = record.is_stacked and (not self.zero or record.is_sharded_within_layers)
        inside = inside and not record.grad_reduction.is_maximum
        return inside and self.num_microbatches == self.stages == 1 and bool(record.grad_reduction.axes)

    def finish(self, gradients: Tree) -> Tree:
        """Reduces the gradients that the backward pass has not reduced, and those of parameters that stages share.

        Args:
          gradients: float32, in the shapes of the arrays that `wrap` differentiates by: local to each rank's samples
            where they are not reduced yet.

        Returns:
          The reduced gradients, sharded as `storage_spec`.
        """
        # Stacks sharded within layers are reduced layer by layer, all other gradients one by one.
        leaves, tree = jax.tree.flatten(gradients)
        table = jax.tree.leaves(self.records)
        stacks = [members for members in sharded_stacks(table) if not self.is_reduced_in_backward(table[members[0]])]
        for i in set(range(len(leaves))).difference(*stacks):
            if not self.is_reduced_in_backward(table[i]):
                leaves[i] = reduce_gradient(leaves[i], table[i].compute_spec, table[i].grad_reduction)
        # XLA: a reduce-scatter needs its sharded dimension outermost. Of an entire stack it would make a second,
        # transposed copy; layer by layer that copy is of one layer.
        for members in stacks:
            specs, reductions = [table[i].compute_spec for i in members], [table[i].grad_reduction for i in members]
            reduced = scatter_layers([leaves[i] for i in members], reductions, specs)
            for i, leaf in zip(members, reduced, strict=True):
                leaves[i] = leaf
        # Each sharding group has the sum of its samples. Of parameters that several stages have, such as a tied
        # embedding, each stage has a partial sum.
        for i, record in enumerate(table):
            for axes in filter(None, (record.between_groups, record.deferred_axes)):
                deferred = GradReduction(axes, NOT_SHARDED, (), 1, record.grad_reduction.comm_dtype)
                leaves[i] = reduce_gradient(leaves[i], record.storage_spec, deferred)
        return jax.tree.unflatten(tree, leaves)


def zeros_like_reduced(shape: Sequence[int], like: Array, record: ParamSpec, reduction: GradReduction) -> Array:
    """Builds float32 zeros like a rank's reduced gradient, to differentiate by.

    Args:
      shape: of the result.
      like: an array that varies over the mesh axes over which gradients vary before they are reduced.
      record: of the parameter.
      reduction: how its gradient is reduced.
    """
    zeros = jnp.zeros(shape, jnp.float32, out_sharding=explicit_only(record.compute_spec))
    # An all-reduce makes values equal over its axes; a reduce-scatter leaves them different over its shard axes.
    axes = tuple(axis for axis in varying_axes(like) if axis in reduction.shard_axes or axis not in reduction.axes)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
