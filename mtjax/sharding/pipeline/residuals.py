"""Saves residuals of a pipeline stage's forward halves for its backward halves, in slots, or recomputes them.

Both policies return a chunk's output and its vjp function in the backward half.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import map_shards, varying_like
from mtjax.sharding.param_comm import row_major

Tree = Any
Vjp = Callable[[Tree], tuple[Tree, Tree]]
"""Gradient of a chunk's output -> gradients of the parameters, and of the chunk's input."""
Linearize = Callable[[int, Tree], tuple[Tree, Vjp]]
"""(section, input of a chunk) -> its output, and its vjp function: `jax.vjp` of the chunk."""


class ResidualPolicy(Protocol):
    """Decides what is saved; the saved arrays are in the carry of the loop over ticks."""

    def empty(self) -> Tree:
        """Builds the arrays, without residuals."""
        ...

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """Runs a chunk in its forward half.

        Args:
          section: of the chunk.
          arrays: with residuals by slot.
          slot: of this microbatch's chunk.
          start: the chunk's input, [batch, seq, embed] arrays.
          linearize: `jax.vjp` of the chunk.

        Returns:
          The chunk's output, and `arrays` with its residuals in the slot.
        """
        ...

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Vjp]:
        """Returns a chunk's output and its vjp function in its backward half; the arguments are those of `put`."""
        ...


@dataclass(frozen=True)
class RecomputeChunk:
    """Saves nothing: the schedule saves the chunk's input, from which the chunk is recomputed."""

    def empty(self) -> Tree:
        """Returns no arrays."""
        return ()

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """See `ResidualPolicy.put`."""
        # The vjp function is not used, so the compiler removes the computation of its residuals.
        return linearize(section, start)[0], arrays

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Vjp]:
        """See `ResidualPolicy.take`."""
        return linearize(section, start)


@dataclass(frozen=True)
class SaveResiduals:
    """Saves a chunk's output, and those residuals of its vjp function that depend on the chunk's input.

    The backward half linearizes the chunk once more for the other residuals: parameters, casts of them, dropout masks.
    The compiler removes the part of that second trace that only the output and the saved residuals need.
    """

    slots: int
    like: Sequence[Sequence[Array]]
    """By section, an array like each that is saved: the output first."""
    depends: Sequence[Sequence[bool]]
    """By section, which residuals of the vjp function depend on the chunk's input."""

    @classmethod
    def of(cls, sections: int, slots: int, start: Tree, linearize: Linearize) -> "SaveResiduals":
        """Finds out which residuals chunks of these sections have, for inputs like `start`.

        Args:
          sections: their number.
          slots: of each array.
          start: a chunk's input, [batch, seq, embed] arrays.
          linearize: `jax.vjp` of a chunk.
        """

        def leaves(section: int, start: Tree) -> list[Array]:
            return jax.tree.leaves(linearize(section, start)[1])

        # Residuals that do not depend on the chunk's input, such as cast weights, are equal for all microbatches of a
        # chunk, or recomputed from the microbatch's keys, such as dropout masks.
        depends = [_depending(jax.make_jaxpr(lambda x, i=i: leaves(i, x))(start)) for i in range(sections)]
        like = []
        for section, is_saved in enumerate(depends):
            out, vjp = linearize(section, start)
            saved = [leaf for leaf, keep in zip(jax.tree.leaves(vjp), is_saved, strict=True) if keep]
            like.append([*jax.tree.leaves(out), *saved])
        return cls(slots, like, depends)

    def empty(self) -> Tree:
        """Builds zeros by section, array and slot."""
        return [[in_slots(array, self.slots) for array in arrays] for arrays in self.like]

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """See `ResidualPolicy.put`."""
        out, vjp = linearize(section, start)
        saved = [a for a, keep in zip(jax.tree.leaves(vjp), self.depends[section], strict=True) if keep]
        updated = put_in_slot(arrays[section], slot, [*jax.tree.leaves(out), *saved])
        return out, [*arrays[:section], updated, *arrays[section + 1 :]]

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Vjp]:
        """See `ResidualPolicy.take`."""
        # Only the type of `start` matters: all that depends on its values is replaced by what the slot holds.
        out, vjp = linearize(section, start)
        leaves, tree = jax.tree.flatten(vjp)
        saved = iter(take_from_slot(arrays[section], slot))
        out = jax.tree.map(lambda _: next(saved), out)
        leaves = [next(saved) if is_saved else a for a, is_saved in zip(leaves, self.depends[section], strict=True)]
        return out, jax.tree.unflatten(tree, leaves)


def in_slots(like: Array, count: int) -> Array:
    """Builds zeros [count + 1, ...]: slots for `count` arrays like this one, and a last one for idle halves."""
    kind = jax.typeof(like)
    # Idle halves write to the last slot, so that no write needs a branch.
    slots_spec = PartitionSpec(None, *kind.sharding.spec)
    return varying_like(jnp.zeros((count + 1, *kind.shape), kind.dtype, out_sharding=slots_spec), like)


def put_in_slot(buffers: Tree, slot: Array, arrays: Tree) -> Tree:
    """Overwrites one slot of each buffer [slots, ...] with an array [...]."""
    return jax.tree.map(lambda buffer, a: lax.dynamic_update_index_in_dim(buffer, a, slot, 0), buffers, arrays)


def take_from_slot(buffers: Tree, slot: Array) -> Tree:
    """Reads one slot of each buffer, [slots, ...] -> [...], in row-major memory layout."""

    def one(buffer: Array) -> Array:
        array = lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
        return map_shards(row_major, jax.typeof(array).sharding.spec)(array)

    # XLA: in the last ticks nothing is written to slots any more, and the layout of the buffers would be chosen for the
    # products that read them. Between the two loops all buffers would be copied, and be alive twice.
    return jax.tree.map(one, buffers)


def _depending(traced: Any) -> list[bool]:
    """Returns which results of a jaxpr depend on its arguments, by its outermost equations."""
    # Outermost equations suffice: a call or loop that reads something dependent counts as dependent with all its
    # results, so at worst an array too many is saved.
    dependent = set(traced.jaxpr.invars)
    for equation in traced.jaxpr.eqns:
        if any(v in dependent for v in equation.invars if not isinstance(v, Literal)):
            dependent.update(equation.outvars)
    return [not isinstance(v, Literal) and v in dependent for v in traced.jaxpr.outvars]
