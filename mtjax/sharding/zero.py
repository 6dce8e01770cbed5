"""ZeRO (arXiv 1910.02054): what every data rank would hold alike, split over `data`.

Stage 1 splits the optimizer's state, 2 also the gradients, 3 also the parameters. A parameter is split along one of
its dimensions; `ParameterLayout` says which, and where the parameter, its gradient and its moments live.
`mtjax.sharding.parameters` is what a model gets of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from mtjax.sharding.axes import partition_spec, spec
from mtjax.sharding.layer_by_layer import gather_layers, scatter_layers
from mtjax.sharding.parameters import Accumulated, Gathered, Reduced, is_wrapped, sum_over_data, whole
from mtjax.sharding.placement import is_names
from mtjax.theory.layout import LAYERS, UNSPLIT, Layout, is_matrix, split_dimension
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import DATA, Rules

Tree = Any


@dataclass(frozen=True)
class ParameterLayout:
    """Where a model's parameters, gradients and moments live. Every tree is like the parameters'."""

    axes: Tree
    """Logical names."""
    shapes: Tree
    """Abstract arrays."""
    layout: Layout
    mesh: MeshShape
    compute_dtype: str
    """In which layers' matrices are gathered."""

    @cached_property
    def dimensions(self) -> Tree:
        """Dimension that `data` splits, or `UNSPLIT`."""
        choose = partial(split_dimension, layout=self.layout, ways=self.mesh.data)
        return self._map(lambda names, a: choose(names, a.shape), self.shapes)

    @cached_property
    def whole(self) -> Tree:
        """Specs of parameters as products take them: every data rank has them."""
        return self._map(partial(partition_spec, self.layout.rules))

    @cached_property
    def split(self) -> Tree:
        """Specs with what ZeRO adds."""
        return self._map(lambda names, dim: _with_data(self.layout.rules, names, dim), self.dimensions)

    @cached_property
    def stored(self) -> Tree:
        """Specs of parameters between steps."""
        return self.split if self.layout.zero == 3 else self.whole

    @cached_property
    def reduced(self) -> Tree:
        """Specs of gradients once they are summed, and of the optimizer's moments."""
        return self.split if self.layout.zero else self.whole

    @property
    def unsplit(self) -> list[str]:
        """Dotted names of parameters that ZeRO leaves whole, for no dimension divides."""
        if not self.layout.zero or self.mesh.data == 1:
            return []
        leaves = jax.tree_util.tree_leaves_with_path(self.dimensions)
        return [jax.tree_util.keystr(p, simple=True, separator=".") for p, dim in leaves if dim == UNSPLIT]

    @property
    def counts(self) -> dict[str, int]:
        """Elements on one model rank, by the symbols of `contract.Sizes`: P all, U unsplit, W, S, E and N gathered."""
        counts = dict.fromkeys("PUWSEN", 0)

        def add(names: tuple[str, ...], array: Any, dim: int) -> None:
            ways = math.prod(self.mesh.ways(self.layout.rules.axes(name)) for name in names)
            elements = math.prod(array.shape) // ways
            counts["P"] += elements
            if self.layout.zero and dim == UNSPLIT:
                counts["U"] += elements
            elif self.layout.zero == 3:
                matrix, other = "WS" if names[0] == LAYERS else "EN"
                counts[matrix if is_matrix(names) else other] += elements

        self._map(add, self.shapes, self.dimensions)
        return counts

    def manual(self, specs: Tree) -> Tree:
        """`specs` with `data` alone, as `shard_map` over it wants them."""
        return jax.tree.map(lambda s: PartitionSpec(*(DATA if axis == DATA else None for axis in s)), specs)

    def wrap(self, parameters: Tree, num_microbatches: int | None) -> Tree:
        """Parameters as a model gets them: those of stacks for `whole` to resolve, layer by layer.

        Args:
          parameters: placed as `stored`.
          num_microbatches: of the step; None when nothing is differentiated.
        """

        def one(names: tuple[str, ...], dim: int, array: Array) -> Any:
            stacked = names[0] == LAYERS
            own, own_dim = (names[1:], dim - 1) if stacked and dim != UNSPLIT else (names[stacked:], dim)
            if dim != UNSPLIT and self.layout.zero == 3:
                sent = self.compute_dtype if is_matrix(names) else "float32"
                return Gathered(array, own, own_dim, sent, sent if stacked else "float32")
            if num_microbatches and self._reduces_at_once(names, dim, num_microbatches):
                return Reduced(array, self._part(array, names, dim), spec(*own), own_dim)
            return array

        return self._map(one, self.dimensions, parameters)

    def accumulating(self, wrapped: Tree, sums: Tree, num_microbatches: int) -> Tree:
        """Wrapped parameters; with several microbatches those of stacks add their gradients to `sums` by themselves."""

        def one(names: tuple[str, ...], leaf: Any, total: Array) -> Any:
            return Accumulated(leaf, total) if _adds_up(names, num_microbatches) else leaf

        return self._map(one, wrapped, sums)

    def accumulated(self, sums: Tree, gradients: Tree, num_microbatches: int) -> Tree:
        """The sums with a microbatch's gradients, which `accumulating` parameters gave."""

        def one(names: tuple[str, ...], total: Array, gradient: Array) -> Array:
            return gradient if _adds_up(names, num_microbatches) else total + gradient.astype(jnp.float32)

        return self._map(one, sums, gradients)

    def store(self, updated: Tree, before: Tree) -> Tree:
        """Updated parameters where they live between steps: gathered over `data` in stages 1 and 2.

        Those of stacks are gathered layer by layer into the arrays of `before`, so that memory for a layer is all it
        takes. At once, every gather would need a buffer of its own beside the parameters: its result comes with the
        split dimension outermost, and is transposed.

        Args:
          updated: placed as `reduced`.
          before: the parameters of the step's beginning, placed as `stored`; overwritten.
        """
        if self.reduced is self.stored:
            return updated
        leaves, tree = jax.tree.flatten(updated)
        places, old = jax.tree.leaves(self.stored), jax.tree.leaves(before)
        dimensions, stacks = jax.tree.leaves(self.dimensions), self._split_stacks
        for i in set(range(len(leaves))).difference(*stacks):
            leaves[i] = reshard(leaves[i], places[i])
        for members in stacks:
            of = [dimensions[i] for i in members]
            gathered = gather_layers([leaves[i] for i in members], of, [old[i] for i in members])
            for i, leaf in zip(members, gathered, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    def summed(self, gradients: Tree, wrapped: Tree) -> Tree:
        """Gradients summed over `data`: those that the backward pass has not summed yet.

        Those of stacks are scattered layer by layer. At once, every scatter would need its operand a second time, with
        the split dimension outermost.

        Args:
          gradients: float32; each data rank has those of its own samples.
          wrapped: the parameters that they are of.
        """
        leaves, tree = jax.tree.flatten(gradients)
        places, dimensions = jax.tree.leaves(self.whole), jax.tree.leaves(self.dimensions)
        names = jax.tree.leaves(self.axes, is_leaf=is_names)
        is_summed = [is_wrapped(leaf) for leaf in jax.tree.leaves(wrapped, is_leaf=is_wrapped)]
        stacks = [members for members in self._split_stacks if not is_summed[members[0]]]
        for i in set(range(len(leaves))).difference(*stacks):
            leaves[i] = leaves[i] if is_summed[i] else sum_over_data(leaves[i], places[i], dimensions[i])
        for members in stacks:
            own = [leaves[i] for i in members]
            parts = [self._part(leaves[i], names[i], dimensions[i]) for i in members]
            summed = scatter_layers(own, [dimensions[i] for i in members], [places[i] for i in members], parts)
            for i, leaf in zip(members, summed, strict=True):
                leaves[i] = leaf
        return jax.tree.unflatten(tree, leaves)

    @property
    def _split_stacks(self) -> list[list[int]]:
        """Numbers of the leaves that `data` splits inside layers, by the length of the stack that they belong to."""
        stacks: dict[int, list[int]] = {}
        leaves = zip(jax.tree.leaves(self.axes, is_leaf=is_names), jax.tree.leaves(self.dimensions), strict=True)
        for i, ((names, dim), array) in enumerate(zip(leaves, jax.tree.leaves(self.shapes), strict=True)):
            if names[0] == LAYERS and dim > 0:
                stacks.setdefault(array.shape[0], []).append(i)
        return list(stacks.values())

    def whole_but_layers(self, wrapped: Tree) -> Tree:
        """Wrapped parameters outside the stacks whole; a stack's become so where the model scans over its layers."""
        return self._map(lambda names, leaf: leaf if names[0] == LAYERS else whole(leaf), wrapped)

    def _reduces_at_once(self, names: tuple[str, ...], dim: int, num_microbatches: int) -> bool:
        """Whether a gradient is summed over `data` inside the backward pass, microbatch by microbatch."""
        if self.layout.zero >= 2:
            return dim != UNSPLIT
        inside = names[0] == LAYERS and (not self.layout.zero or dim > 0)
        return inside and num_microbatches == 1 and self.mesh.data > 1

    def _part(self, whole: Array, names: tuple[str, ...], dim: int) -> Array:
        """Zeros to differentiate by: shaped like this rank's part of the gradient."""
        shape = [n // self.mesh.data if i == dim else n for i, n in enumerate(whole.shape)]
        zeros = jnp.zeros(shape, jnp.float32, out_sharding=spec(*names))
        return zeros if dim == UNSPLIT else lax.pcast(zeros, (DATA,), to="varying")

    def _map(self, function: Callable[..., Any], *trees: Tree) -> Tree:
        return jax.tree.map(function, self.axes, *trees, is_leaf=is_names)


def _adds_up(names: tuple[str, ...], num_microbatches: int) -> bool:
    """Whether the backward pass adds a gradient to the sum layer by layer, so that it never lives as a whole."""
    return names[0] == LAYERS and num_microbatches > 1


def _with_data(rules: Rules, names: tuple[str, ...], dim: int) -> PartitionSpec:
    axes = list(partition_spec(rules, names))
    if dim != UNSPLIT:
        axes[dim] = DATA
    return PartitionSpec(*axes)
