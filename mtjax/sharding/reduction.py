"""Which of a step's gradients are summed over which ranks, and when.

A gradient is summed over the mesh axes that replicate its parameter, in the type of `gradient_wire_dtype`. Mostly that
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

from mtjax.sharding.axes import explicit_part, spec, varying_axes
from mtjax.sharding.layer_by_layer import scatter_layers
from mtjax.sharding.parameters import Gathered, GradientSum, Reduced, sum_gradient
from mtjax.sharding.records import ParameterRecord, split_stacks
from mtjax.sharding.zero import gathered, kept, once_a_step
from mtjax.theory.layout import UNSPLIT

Tree = Any

NOTHING = GradientSum((), UNSPLIT, (), 1)
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

        def one(record: ParameterRecord, array: Array) -> Any:
            if record.sent is not None and not record.is_gathered_once:
                return gathered(record, array)
            if record.is_gathered_once and record.is_split_inside_layers and self.num_microbatches == self.stages == 1:
                return kept(record, array)
            whole = once_a_step(record, array) if record.is_gathered_once else array
            if self.is_early(record):
                zeros = zeros_to_sum(array.shape, array, record, record.total)
                return Reduced(whole, zeros, spec(*record.used_axes), record.used_total)
            if isinstance(whole, Gathered) or whole.dtype != jnp.float32:
                shape = [n * record.total.ways if i == record.total.dim else n for i, n in enumerate(array.shape)]
                return Reduced(whole, zeros_to_sum(shape, array, record, NOTHING), spec(*record.used_axes), NOTHING)
            return whole

        return jax.tree.map(one, self.records, parameters)

    def is_early(self, record: ParameterRecord) -> bool:
        """Whether a gradient is summed over ranks inside the backward pass of each microbatch."""
        if self.zero >= 2:
            return record.is_split
        inside = record.is_stacked and (not self.zero or record.is_split_inside_layers)
        return inside and self.num_microbatches == self.stages == 1 and bool(record.total.axes)

    def finish(self, gradients: Tree) -> Tree:
        """Sums the gradients that the backward pass has not summed yet, and those that stages share.

        Those of stacks are scattered layer by layer. All at once, every scatter would need a second copy of its
        operand, with the split dimension outermost.

        Args:
          gradients: float32; each rank has those of its own samples.
        """
        leaves, tree = jax.tree.flatten(gradients)
        table = jax.tree.leaves(self.records)
        stacks = [members for members in split_stacks(table) if not self.is_early(table[members[0]])]
        for i in set(range(len(leaves))).difference(*stacks):
            if not self.is_early(table[i]):
                leaves[i] = sum_gradient(leaves[i], table[i].whole, table[i].total)
        for members in stacks:
            places, totals = [table[i].whole for i in members], [table[i].total for i in members]
            summed = scatter_layers([leaves[i] for i in members], totals, places)
            for i, leaf in zip(members, summed, strict=True):
                leaves[i] = leaf
        for i, record in enumerate(table):
            if record.late:
                late = GradientSum(record.late, UNSPLIT, (), 1, record.total.wire)
                leaves[i] = sum_gradient(leaves[i], record.stored, late)
        return jax.tree.unflatten(tree, leaves)


def zeros_to_sum(shape: Sequence[int], like: Array, record: ParameterRecord, total: GradientSum) -> Array:
    """Zeros shaped like a rank's gradient once it is summed, to differentiate by.

    Args:
      shape: of them.
      like: varies over the axes over which gradients do before they are summed.
      record: of the parameter.
      total: how its gradient is summed.
    """
    zeros = jnp.zeros(shape, jnp.float32, out_sharding=explicit_part(record.whole))
    axes = tuple(axis for axis in varying_axes(like) if axis in total.parts or axis not in total.axes)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros
