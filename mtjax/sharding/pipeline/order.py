"""Orders a stage's collectives by data dependencies, on platforms whose runtime has no order.

XLA: for CPUs, it starts a collective as soon as those before it in the schedule have started, and counts a conditional
as started before the collectives in its branch have; a program loaded from the compilation cache does not order the
collectives in branches at all. Two devices may then start the collectives of a conditional and those outside it in
different orders and deadlock, or a collective may be matched with another one: all collectives that `shard_map` creates
over the same devices have the same name. GPUs are not affected: every device runs its operations in the order of the
schedule, and each conditional to its end.

So on CPUs each conditional depends on the operations before it, and those after it depend on the conditional.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.axes import varying_axes
from mtjax.sharding.pipeline.stage_transfer import ordering_token

Tree = Any


@dataclass(frozen=True)
class Order:
    """Adds data dependencies between parts of a program, where they are needed."""

    is_needed: bool
    """Whether the runtime has no order of collectives; if it has one, no method changes the program."""

    def zero(self, *before: Tree) -> Array | int:
        """Returns a 0 that depends on the floating-point arrays of `before`."""
        # Integers, such as tokens, are inputs that no collective computes.
        arrays = [a for a in jax.tree.leaves(before) if _is_float(a)]
        return ordering_token(arrays) if self.is_needed and arrays else 0

    def when(self, holds: Array, *before: Tree) -> Array:
        """Makes the condition `holds` depend on the floating-point arrays of `before`."""
        # The comparison always holds, but the compiler can't know it, so the conditional waits for all of `before`.
        return holds & (self.zero(*before) == 0) if self.is_needed else holds

    def after(self, tree: Tree, *before: Tree) -> Tree:
        """Makes the floating-point arrays of `tree` depend on those of `before`."""
        return self.waiting(tree, self.zero(*before))

    def waiting(self, tree: Tree, zero: Array | int) -> Tree:
        """Makes the floating-point arrays of `tree` depend on a `zero`."""
        if isinstance(zero, int):
            return tree
        ranks = set(varying_axes(zero))

        def one(a: Any) -> Any:
            # An array that does not vary over ranks was computed from constants alone: it has nothing to wait for.
            waits = _is_float(a) and ranks <= set(varying_axes(a))
            # A select, because an addition of 0 would turn -0 into 0.
            return jnp.where(zero == 0, a, jnp.zeros((), a.dtype)) if waits else a

        return jax.tree.map(one, tree)


def _is_float(a: Any) -> bool:
    return isinstance(a, Array) and jnp.issubdtype(a.dtype, jnp.floating)
