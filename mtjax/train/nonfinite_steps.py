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

from mtjax.config.layer_pattern import KIND_OF
from mtjax.layout.layouts import LAYERS
from mtjax.layout.stacks import DENSE, STACK
from mtjax.sharding.axes import shard_like_rows
from mtjax.sharding.param_specs import min_and_sum_over_shards

Tree = Any

Numbers = Callable[[str], Sequence[int]]
"""Maps the dotted name of a stacked array to the indices of its layers."""

GOOD = -1
"""Value of `first_bad` if everything is finite."""


@dataclass(frozen=True)
class CheckedTensor:
    """A parameter, or one layer of a stacked one."""

    name: str
    """Dotted name."""
    layer: int | None = None
    """Layer index, from 0."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def first_bad(scalar: Array, values: Tree, records: Tree, numbers_of: Numbers = lambda _: ()) -> Array:
    """Returns the index of the first tensor that is not finite; see `norm_and_first_bad`. The norm may overflow."""
    first, _, count = _search(values, records, numbers_of)
    return _chosen(first, count, scalar)


def norm_and_first_bad(
    scalar: Array, values: Tree, records: Tree, numbers_of: Numbers, unrolled: bool = False
) -> tuple[Array, Array]:
    """Returns the norm of all values, float32, and the index of the first tensor that is not finite, int32, in the
    order of the backward pass (`skipped_steps.tensors`), from one pass over the values; both are replicated.

    A tensor counts as finite if the sum of squares of each device's shard is finite.

    Args:
      scalar: has to be finite, too, and so has the norm. If only they are not, the index is the number of tensors.
      values: gradients or parameters, with any sharding.
      records: of every parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...
      unrolled: whether stacked matrices have just been concatenated from those of the layers.

    Returns:
      The norm; and the index, `GOOD` when everything is finite.
    """
    first, norm, count = _search(values, records, numbers_of, unrolled)
    return norm, _chosen(first, count, scalar + norm)


def _search(values: Tree, records: Tree, numbers_of: Numbers, unrolled: bool = False) -> tuple[Array, Array, int]:
    """Returns the index of the first tensor that is not finite, or their number; the norm; their number."""
    in_tree_order = tensors_in_tree_order(records, numbers_of)
    leaves, kinds = jax.tree.leaves(values), jax.tree.leaves(records)
    counts = [a.shape[0] if kind.is_stacked else 1 for a, kind in zip(leaves, kinds, strict=True)]
    indices = np.split(np.argsort(backwards(in_tree_order)).astype(np.int32), np.cumsum(counts)[:-1])
    # Shard the indices like the layers (pipeline stages): a device that has only some layers needs only theirs.
    spread = [shard_like_rows(p, a) if k.is_stacked else p for p, a, k in zip(indices, leaves, kinds, strict=True)]

    def of_shards(parts: tuple[list[Array], list[Array]]) -> tuple[Array, list[Array]]:
        firsts, sums = [], []
        for a, index, kind in zip(*parts, kinds, strict=True):
            squares = _squares_of_layers(a, unrolled and kind.is_matrix) if kind.is_stacked else jnp.square(a).sum()
            firsts.append(jnp.where(jnp.isfinite(squares), len(in_tree_order), index))
            sums.append(squares.sum())
        return jnp.concatenate(firsts).min(), sums

    first, total = min_and_sum_over_shards(of_shards, (leaves, spread))
    return first, jnp.sqrt(total), len(in_tree_order)


def _chosen(first: Array, count: int, scalar: Array) -> Array:
    return jnp.where((first == count) & jnp.isfinite(scalar), GOOD, first).astype(jnp.int32)


def _squares_of_layers(stack: Array, concatenated: bool) -> Array:
    """Returns the sum of squares of each layer, [layers]."""
    if not concatenated:
        return jnp.square(stack).sum(axis=tuple(range(1, stack.ndim)))
    # XLA: a slice of a concatenation is its operand; a sum over all of it takes 4 to 7 times as long as reading it.
    return jnp.stack([jnp.square(stack[i]).sum() for i in range(stack.shape[0])])


def tensors_in_tree_order(records: Tree, numbers_of: Numbers) -> list[CheckedTensor]:
    """Lists the tensors of a model in the order of its parameters."""
    named: list[CheckedTensor] = []
    for record in jax.tree.leaves(records):
        layers: Sequence[int | None] = [None]
        if record.is_stacked:  # with pipeline stages there may be padding rows
            numbers, rows = numbers_of(record.name), range(record.shape[0])
            layers = numbers if len(numbers) == len(rows) else rows
        named += [CheckedTensor(record.name, layer) for layer in layers]
    return named


def backwards(in_tree_order: Sequence[CheckedTensor]) -> list[int]:
    """Returns the indices into `in_tree_order` in the order of the backward pass; a decoder's stack comes before an
    encoder's."""

    one_section = {STACK, DENSE, *KIND_OF.values()}

    def key(index: int) -> tuple[bool, str, int, int]:
        tensor = in_tree_order[index]
        if tensor.layer is None:
            return True, "", 0, index
        stack = tensor.name.partition(f".{LAYERS}.")[0]
        return False, "" if stack in one_section else stack, -tensor.layer, index

    return sorted(range(len(in_tree_order)), key=key)
