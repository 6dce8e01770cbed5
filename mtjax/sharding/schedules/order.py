"""A total order of what a stage sends, by data, for devices whose runtime does not keep one.

XLA for CPUs starts a collective as soon as those before it in its schedule have been started, and takes a conditional
for started while the collectives in its branch are not; in a program that was loaded from the compilation cache, it
knows nothing of collectives in branches at all. Two devices may then begin a conditional's collectives and those beside
it in different orders, and wait for each other forever, or be joined with the wrong partner: all collectives that
`shard_map` writes over the same devices have one name. GPU programs are not concerned: every device runs its operations
in the order of the schedule, conditionals as a whole.

So on CPUs each conditional waits for what comes before it, and what comes after it waits for the conditional.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.axes import varying_axes
from mtjax.sharding.schedules.send import zero_behind

Tree = Any


@dataclass(frozen=True)
class Order:
    """Whether, and how, parts of a program wait for each other."""

    is_needed: bool
    """Whether the runtime keeps no order by itself; otherwise nothing here changes the program."""

    def zero(self, *before: Tree) -> Array | int:
        """0, which is not known before the floating-point arrays of `before` are there."""
        arrays = [a for a in jax.tree.leaves(before) if _is_float(a)]
        return zero_behind(arrays) if self.is_needed and arrays else 0

    def when(self, holds: Array, *before: Tree) -> Array:
        """`holds`, not known before the arrays of `before` are there."""
        return holds & (self.zero(*before) == 0) if self.is_needed else holds

    def behind(self, tree: Tree, *before: Tree) -> Tree:
        """`tree`, whose floating-point arrays are not there before those of `before`."""
        return self.waiting(tree, self.zero(*before))

    def waiting(self, tree: Tree, zero: Array | int) -> Tree:
        """`tree`, whose floating-point arrays are not there before a `zero`."""
        if isinstance(zero, int):
            return tree
        ranks = set(varying_axes(zero))

        def one(a: Any) -> Any:
            # What is the same on all ranks was computed from constants alone, and waits for nothing.
            waits = _is_float(a) and ranks <= set(varying_axes(a))
            # By a choice, not a sum, which would make 0 of -0.
            return jnp.where(zero == 0, a, jnp.zeros((), a.dtype)) if waits else a

        return jax.tree.map(one, tree)


def _is_float(a: Any) -> bool:
    return isinstance(a, Array) and jnp.issubdtype(a.dtype, jnp.floating)
