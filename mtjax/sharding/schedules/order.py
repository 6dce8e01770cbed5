"""A total order of a stage's collectives by data dependencies, for devices whose runtime does not keep one.

XLA for CPUs starts a collective as soon as those before it in the schedule have started, and counts a conditional as
started before the collectives in its branch are; a program loaded from the compilation cache does not order the
collectives in branches at all. Two devices may then start the collectives of a conditional and those outside it in
different orders and wait for each other forever, or a collective may be matched with another one: all collectives that
`shard_map` creates over the same devices have the same name. GPUs are not affected: every device runs its operations in
the order of the schedule, and each conditional to its end.

So on CPUs each conditional waits for the operations before it, and those after it wait for the conditional.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.axes import varying_axes
from mtjax.sharding.schedules.stage_transfer import ordering_token

Tree = Any


@dataclass(frozen=True)
class Order:
    """Makes parts of a program wait for each other, if that is needed."""

    is_needed: bool
    """Whether the runtime does not keep an order itself; if it does, no method changes the program."""

    def zero(self, *before: Tree) -> Array | int:
        """A 0 that depends on the floating-point arrays of `before`."""
        arrays = [a for a in jax.tree.leaves(before) if _is_float(a)]
        return ordering_token(arrays) if self.is_needed and arrays else 0

    def when(self, holds: Array, *before: Tree) -> Array:
        """`holds`, made to depend on the floating-point arrays of `before`."""
        return holds & (self.zero(*before) == 0) if self.is_needed else holds

    def behind(self, tree: Tree, *before: Tree) -> Tree:
        """`tree`, whose floating-point arrays are made to depend on those of `before`."""
        return self.waiting(tree, self.zero(*before))

    def waiting(self, tree: Tree, zero: Array | int) -> Tree:
        """`tree`, whose floating-point arrays are made to depend on a `zero`."""
        if isinstance(zero, int):
            return tree
        ranks = set(varying_axes(zero))

        def one(a: Any) -> Any:
            # An array that is the same on all ranks was computed from constants alone: it has nothing to wait for.
            waits = _is_float(a) and ranks <= set(varying_axes(a))
            # By selecting, not adding, which would turn -0 into 0.
            return jnp.where(zero == 0, a, jnp.zeros((), a.dtype)) if waits else a

        return jax.tree.map(one, tree)


def _is_float(a: Any) -> bool:
    return isinstance(a, Array) and jnp.issubdtype(a.dtype, jnp.floating)
