"""What a stage keeps of a forward half until its backward half, in slots: inputs alone, or what autodiff saves.

Both kinds can say what a section's chunk put out, and pull a gradient back through it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import fully_manual, varying_like

Tree = Any
Pull = Callable[[Tree], tuple[Tree, Tree]]
"""Gradient of a chunk's output -> gradients of the parameters, and of the chunk's input."""
Linearize = Callable[[int, Tree], tuple[Tree, Pull]]
"""(section, input of a chunk) -> its output, and the pull: `jax.vjp` of the chunk."""


class ResidualPolicy(Protocol):
    """A way of keeping; the arrays themselves go from tick to tick."""

    def empty(self) -> Tree:
        """Arrays with nothing in them."""
        ...

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """Runs a chunk: its output, and the arrays with what its backward half needs."""
        ...

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Pull]:
        """A chunk's output, and its pull."""
        ...


@dataclass(frozen=True)
class RecomputeChunk:
    """Nothing but the input is kept, by the schedule: the chunk is computed again."""

    def empty(self) -> Tree:
        """None."""
        return ()

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """As `Kept.put` says; the pull is dropped, and the compiler with it what only it needs."""
        return linearize(section, start)[0], arrays

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Pull]:
        """As `Kept.take` says."""
        return linearize(section, start)


@dataclass(frozen=True)
class SaveResiduals:
    """What a chunk's pull is made of, as far as it depends on the chunk's input, and the chunk's output.

    The rest - parameters, masks of dropout - comes from linearizing anew in the backward half. What of that trace only
    the output and the kept residuals would need, the compiler drops.
    """

    slots: int
    like: Sequence[Sequence[Array]]
    """By section, an array like each that is kept: output first."""
    depends: Sequence[Sequence[bool]]
    """By section, which of the pull's arrays depend on the chunk's input."""

    @classmethod
    def of(cls, sections: int, slots: int, start: Tree, linearize: Linearize) -> "SaveResiduals":
        """What chunks of these sections leave behind, for inputs like `start`."""

        def leaves(section: int, start: Tree) -> list[Array]:
            return jax.tree.leaves(linearize(section, start)[1])

        depends = [_depending(jax.make_jaxpr(lambda x, i=i: leaves(i, x))(start)) for i in range(sections)]
        like = []
        for section, moving in enumerate(depends):
            out, pull = linearize(section, start)
            own = [leaf for leaf, moves in zip(jax.tree.leaves(pull), moving, strict=True) if moves]
            like.append([*jax.tree.leaves(out), *own])
        return cls(slots, like, depends)

    def empty(self) -> Tree:
        """Zeros by section, array and slot."""
        return [[in_slots(array, self.slots) for array in arrays] for arrays in self.like]

    def put(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Tree]:
        """As `Kept.put` says."""
        out, pull = linearize(section, start)
        moving = [a for a, moves in zip(jax.tree.leaves(pull), self.depends[section], strict=True) if moves]
        mine = put_in_slot(arrays[section], slot, [*jax.tree.leaves(out), *moving])
        return out, [*arrays[:section], mine, *arrays[section + 1 :]]

    def take(self, section: int, arrays: Tree, slot: Array, start: Tree, linearize: Linearize) -> tuple[Tree, Pull]:
        """As `Kept.take` says; of `start` only the type matters."""
        out, pull = linearize(section, start)
        leaves, tree = jax.tree.flatten(pull)
        kept = iter(take_from_slot(arrays[section], slot))
        out = jax.tree.map(lambda _: next(kept), out)
        leaves = [next(kept) if moves else a for a, moves in zip(leaves, self.depends[section], strict=True)]
        return out, jax.tree.unflatten(tree, leaves)


def in_slots(like: Array, count: int) -> Array:
    """Zeros for `count` arrays like this one, and one more for halves that do not count."""
    kind = jax.typeof(like)
    place = PartitionSpec(None, *kind.sharding.spec)
    return varying_like(jnp.zeros((count + 1, *kind.shape), kind.dtype, out_sharding=place), like)


def put_in_slot(rings: Tree, slot: Array, arrays: Tree) -> Tree:
    """Arrays with slots, with one slot of each overwritten."""
    return jax.tree.map(lambda ring, a: lax.dynamic_update_index_in_dim(ring, a, slot, 0), rings, arrays)


def take_from_slot(rings: Tree, slot: Array) -> Tree:
    """One slot of each array, laid out as it was put there.

    In the last ticks nothing is put into slots any more, and XLA would lay them out for the products that read them:
    between two loops it would write all slots anew, and hold both.
    """

    def one(ring: Array) -> Array:
        array = lax.dynamic_index_in_dim(ring, slot, keepdims=False)
        return fully_manual(in_rows, jax.typeof(array).sharding.spec)(array)

    def in_rows(part: Array) -> Array:
        return with_layout_constraint(part, Layout(tuple(range(part.ndim))))

    return jax.tree.map(one, rings)


def _depending(traced: Any) -> list[bool]:
    """Which results of a jaxpr depend on its arguments, as far as its outermost equations say."""
    moving = set(traced.jaxpr.invars)
    for equation in traced.jaxpr.eqns:
        if any(v in moving for v in equation.invars if not isinstance(v, Literal)):
            moving.update(equation.outvars)
    return [not isinstance(v, Literal) and v in moving for v in traced.jaxpr.outvars]
