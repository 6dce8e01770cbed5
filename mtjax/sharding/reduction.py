"""Which of a step's gradients are summed over which ranks, and when.

A gradient is summed over the mesh axes that replicate its parameter, in the type of `grad_reduce_dtype`. Mostly that
happens once a step, after the last microbatch. Where the rest of the backward pass can hide it - with a single
microbatch - and where full gradients must never live - in ZeRO-2 and 3 - it happens inside the backward pass, layer by
layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.axes import explicit_only, spec, varying_axes
from mtjax.sharding.param_comm import GatherOnUse, GradReduction, ReduceGradOnUse, reduce_gradient
from mtjax.sharding.param_specs import ParamSpec, sharded_stacks
from mtjax.sharding.stacked_collectives import scatter_layers
from mtjax.sharding.zero import gather_and_keep, gather_on_use, wrap_for_step
from mtjax.theory.layout import NOT_SHARDED

Tree = Any

NO_REDUCTION = GradReduction((), NOT_SHARDED, (), 1)
"""No sum."""


@dataclass(frozen=True)
class Reduction:
    """The reduction of one step's gradients."""

    records: Tree
    """Of each parameter."""
    zero: int
    """ZeRO's stage."""
    num_microbatches: int
    """Of the step."""
    stages: int = 1
    """Of a pipeline, whose backward passes run as often as the timetable has ticks, also for nothing."""

    def wrap(self, parameters: Tree) -> Tree:
        """Parameters to differentiate by: some gather themselves or reduce their gradients where they are used.

        Of ZeRO-1 and 2 the layers' matrices are still to be gathered, once: see `once_a_step`. Where the step's only
        microbatch can hide it, as it hides the sums of gradients, the loop over the layers does it.

        Args:
          parameters: placed as `stored`, and varying over the axes over which the batch does.
        """

        def one(record: ParamSpec, array: Array) -> Any:
            if record.gather_dtype is not None and not record.is_gathered_per_step:
                return gather_on_use(record, array)
            if (
                record.is_gathered_per_step
                and record.is_sharded_within_layers
                and self.num_microbatches == self.stages == 1
            ):
                return gather_and_keep(record, array)
            whole = wrap_for_step(record, array) if record.is_gathered_per_step else array
            if self.is_reduced_in_backward(record):
                zeros = zeros_like_reduced(array.shape, array, record, record.grad_reduction)
                return ReduceGradOnUse(whole, zeros, spec(*record.layer_axes), record.layer_grad_reduction)
            if isinstance(whole, GatherOnUse) or whole.dtype != jnp.float32:
                shape = [
                    n * record.grad_reduction.num_shards if i == record.grad_reduction.dim else n
                    for i, n in enumerate(array.shape)
                ]
                return ReduceGradOnUse(
                    whole,
                    zeros_like_reduced(shape, array, record, NO_REDUCTION),
                    spec(*record.layer_axes),
                    NO_REDUCTION,
                )
            return whole

        return jax.tree.map(one, self.records, parameters)

    def is_reduced_in_backward(self, record: ParamSpec) -> bool:
        """Whether a gradient is summed over ranks inside the backward pass of each microbatch."""
        if self.zero >= 2:
            return record.is_zero_sharded
        inside = record.is_stacked and (not self.zero or record.is_sharded_within_layers)
        return inside and self.num_microbatches == self.stages == 1 and bool(record.grad_reduction.axes)

    def finish(self, gradients: Tree) -> Tree:
        """Sums the gradients that the backward pass has not summed yet, and those that stages share.

        Those of stacks are scattered layer by layer. All at once, every scatter would need a second copy of its
        operand, with the split dimension outermost.

        Args:
          gradients: float32; each rank has those of its own samples.
        """
        leaves, tree = jax.tree.flatten(gradients)
        table = jax.tree.leaves(self.records)
        stacks = [members for members in sharded_stacks(table) if not self.is_reduced_in_backward(table[members[0]])]
        for i in set(range(len(leaves))).difference(*stacks):
            if not self.is_reduced_in_backward(table[i]):
                leaves[i] = reduce_gradient(leaves[i], table[i].compute_spec, table[i].grad_reduction)
        for members in stacks:
            places, totals = [table[i].compute_spec for i in members], [table[i].grad_reduction for i in members]
            summed = scatter_layers([leaves[i] for i in members], totals, places)
            for i, leaf in zip(members, summed, strict=True):
                leaves[i] = leaf
        for i, record in enumerate(table):
            if record.deferred_axes:
                late = GradReduction(record.deferred_axes, NOT_SHARDED, (), 1, record.grad_reduction.comm_dtype)
                leaves[i] = reduce_gradient(leaves[i], record.storage_spec, late)
        return jax.tree.unflatten(tree, leaves)


def zeros_like_reduced(shape: Sequence[int], like: Array, record: ParamSpec, total: GradReduction) -> Array:
    """Zeros shaped like a rank's gradient once it is summed, to differentiate by.

    Args:
      shape: of them.
      like: varies over the axes over which gradients do before they are summed.
      record: of the parameter.
      total: how its gradient is summed.
    """
    zeros = jnp.zeros(shape, jnp.float32, out_sharding=explicit_only(record.compute_spec))
    axes = tuple(axis for axis in varying_axes(like) if axis in total.shard_axes or axis not in total.axes)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
