"""Finds the first tensor that is not finite in a step's loss and gradients.

The devices detect it before a step changes anything, and all of them skip the step; the host reports it when it logs
(`mtjax.train.skipped_steps`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.layout.layouts import LAYERS
from mtjax.layout.stacks import DENSE, STACK
from mtjax.sharding.axes import shard_like_rows
from mtjax.sharding.placement import min_over_shards

Tree = Any

Numbers = Callable[[str], Sequence[int]]
"""Maps the dotted name of a stacked array to the indices of its layers."""

GOOD = -1
"""Value of `first_bad` if everything is finite."""


@dataclass(frozen=True)
class Tensor:
    """A parameter, or one layer of a stacked one."""

    name: str
    """Dotted name."""
    layer: int | None = None
    """Layer index, from 0."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def tensors(records: Tree, numbers_of: Numbers = lambda _: ()) -> list[Tensor]:
    """Lists the tensors of a model in the order of the backward pass; `first_bad` is an index into this list.

    Layers come from the last to the first, then the parameters outside of layers. A cotangent that overflows in a layer
    makes the gradients of all layers before it nonfinite, so the first in this order is nearest to the cause.

    Args:
      records: of every parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...
    """
    in_tree_order = _in_tree_order(records, numbers_of)
    return [in_tree_order[i] for i in _backwards(in_tree_order)]


def first_bad(scalar: Array, values: Tree, records: Tree, numbers_of: Numbers = lambda _: ()) -> Array:
    """Returns the index in `tensors` of the first tensor that is not finite, as an int32 that is replicated on all
    devices.

    A tensor counts as finite if the sum of squares / 4 of each device's shard is finite.

    Args:
      scalar: has to be finite, too. If only this is not, the result is the number of tensors.
      values: gradients or parameters, with any sharding.
      records: of every parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...

    Returns:
      `GOOD` when everything is finite.
    """
    in_tree_order = _in_tree_order(records, numbers_of)
    leaves = jax.tree.leaves(values)
    stacked = [record.is_stacked for record in jax.tree.leaves(records)]
    counts = [a.shape[0] if is_stack else 1 for a, is_stack in zip(leaves, stacked, strict=True)]
    indices = np.split(np.argsort(_backwards(in_tree_order)).astype(np.int32), np.cumsum(counts)[:-1])
    # Shard the indices like the layers (pipeline stages): a device that has only some layers needs only theirs.
    spread = [shard_like_rows(p, a) if is_stack else p for p, a, is_stack in zip(indices, leaves, stacked, strict=True)]

    def first_of(parts: tuple[list[Array], list[Array]]) -> Array:
        firsts = []
        for a, index, is_stack in zip(*parts, stacked, strict=True):
            # Per layer of a stacked array, or of the entire array. XLA: without the factor 1/2, XLA on CPUs would
            # share these squares with those of the gradient norm, and write them all to memory.
            squares = jnp.square(a / 2).sum(axis=tuple(range(is_stack, a.ndim)))
            firsts.append(jnp.where(jnp.isfinite(squares), len(in_tree_order), index))
        return jnp.concatenate(firsts).min()

    first = min_over_shards(first_of, (leaves, spread))
    return jnp.where((first == len(in_tree_order)) & jnp.isfinite(scalar), GOOD, first).astype(jnp.int32)


def _in_tree_order(records: Tree, numbers_of: Numbers) -> list[Tensor]:
    named: list[Tensor] = []
    for record in jax.tree.leaves(records):
        layers: Sequence[int | None] = [None]
        if record.is_stacked:  # with pipeline stages there may be padding rows
            numbers, rows = numbers_of(record.name), range(record.shape[0])
            layers = numbers if len(numbers) == len(rows) else rows
        named += [Tensor(record.name, layer) for layer in layers]
    return named


def _backwards(in_tree_order: Sequence[Tensor]) -> list[int]:
    """Returns the indices into `in_tree_order` in the order of `tensors`; a decoder's stack comes before an
    encoder's."""

    def key(index: int) -> tuple[bool, str, int, int]:
        tensor = in_tree_order[index]
        if tensor.layer is None:
            return True, "", 0, index
        stack = tensor.name.partition(f".{LAYERS}.")[0]
        return False, "" if stack in (STACK, DENSE) else stack, -tensor.layer, index

    return sorted(range(len(in_tree_order)), key=key)
