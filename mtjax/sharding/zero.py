"""ZeRO (arXiv 1910.02054): data that every rank would hold a copy of, split over ranks.

Stage 1 splits the optimizer's state, 2 also the gradients, 3 also the parameters. A parameter is split along one of
its dimensions, which its record names. This module says how a split parameter is used and how it is stored again;
`mtjax.sharding.reduction` says how its gradient is summed.
"""

from typing import Any

import jax
from jax import Array
from jax.sharding import reshard

from mtjax.sharding.layer_by_layer import gather_layers
from mtjax.sharding.parameters import Gathered, materialize
from mtjax.sharding.records import ParameterRecord, split_stacks

Tree = Any


def for_use(records: Tree, parameters: Tree) -> Tree:
    """Parameters for a model without gradients; those of stacks are left for `materialize` to gather layer by layer.

    Args:
      records: of each parameter.
      parameters: placed as `stored`.
    """
    return materialize_outside_stacks(records, wrap_for_use(records, parameters))


def wrap_for_use(records: Tree, parameters: Tree) -> Tree:
    """Parameters without gradients, of which some are still to be gathered: `materialize` does it."""
    return jax.tree.map(lambda r, array: array if r.sent is None else gathered(r, array), records, parameters)


def gathered(record: ParameterRecord, part: Array) -> Gathered:
    """A parameter of ZeRO-3, to be gathered where it is used."""
    assert record.sent is not None
    dtype = record.sent if record.is_stacked else "float32"
    return Gathered(part, record.used_axes, record.used_total, record.sent, dtype)


def materialize_outside_stacks(records: Tree, wrapped: Tree) -> Tree:
    """Wrapped parameters outside the stacks as arrays; a stack's are resolved where the model scans over its layers."""
    return jax.tree.map(lambda record, leaf: leaf if record.is_stacked else materialize(leaf), records, wrapped)


def store(records: Tree, updated: Tree, before: Tree) -> Tree:
    """Updated parameters where they live between steps: gathered in stages 1 and 2.

    Those of stacks are gathered layer by layer into the arrays of `before`, so that buffers of one layer suffice. All
    at once, every gather would need a buffer of its own besides the parameters: its result comes with the split
    dimension outermost, and is transposed.

    Args:
      records: of each parameter.
      updated: placed as `reduced`.
      before: the parameters of the step's beginning, placed as `stored`; overwritten.
    """
    table = jax.tree.leaves(records)
    if all(record.reduced == record.stored for record in table):
        return updated
    leaves, tree = jax.tree.flatten(updated)
    old, stacks = jax.tree.leaves(before), split_stacks(table)
    for i in set(range(len(leaves))).difference(*stacks):
        leaves[i] = reshard(leaves[i], table[i].stored)
    for members in stacks:
        totals = [table[i].total for i in members]
        whole = gather_layers([leaves[i] for i in members], totals, [old[i] for i in members])
        for i, leaf in zip(members, whole, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)
