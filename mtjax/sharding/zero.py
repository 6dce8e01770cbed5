"""ZeRO (arXiv 1910.02054): data that every rank would hold a copy of, split over ranks.

Stage 1 splits the optimizer's state and, as they are their own masters, the float32 parameters; 2 also the gradients;
3 gathers each layer's parameters for each use, where 1 and 2 gather all of them once a step. A parameter is split along
one of its dimensions, which its record names. This module says how a split parameter is used;
`mtjax.sharding.reduction` says how its gradient is summed.
"""

from dataclasses import replace
from typing import Any

import jax
from jax import Array

from mtjax.sharding.param_comm import GatherOnUse, ReduceGradOnUse, is_wrapped, materialize
from mtjax.sharding.param_specs import ParamSpec, sharded_stacks
from mtjax.sharding.stacked_collectives import gather_layers

Tree = Any


def gather_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Parameters for a model without gradients; those of stacks are left for `materialize` to gather layer by layer.

    Args:
      records: of each parameter.
      parameters: placed as `stored`.
    """
    return materialize_outside_stacks(records, wrap_for_inference(records, parameters))


def wrap_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Parameters without gradients, of which some are still to be gathered: `materialize` does it."""
    return jax.tree.map(
        lambda r, array: array if r.gather_dtype is None else gather_on_use(r, array), records, parameters
    )


def gather_on_use(record: ParamSpec, part: Array) -> GatherOnUse | Array:
    """A parameter of which ranks have parts, to be gathered where it is used; gathered, where that takes all layers."""
    assert record.gather_dtype is not None
    dtype = record.gather_dtype if record.is_stacked else "float32"
    if record.is_stacked and not record.is_sharded_within_layers:
        return _all_layers(record, part)
    return GatherOnUse(part, record.layer_axes, record.layer_grad_reduction, record.gather_dtype, dtype)


def gather_and_keep(record: ParamSpec, part: Array) -> GatherOnUse:
    """A parameter of layers, of which ranks have parts, for the loop over the layers to gather once for both passes."""
    assert record.gather_dtype is not None
    return GatherOnUse(
        part,
        record.layer_axes,
        record.layer_grad_reduction,
        record.gather_dtype,
        record.gather_dtype,
        keep_for_backward=True,
    )


def wrap_for_step(record: ParamSpec, part: Array) -> GatherOnUse | Array:
    """A parameter of which ranks have parts, whole for all microbatches of a step: gathered here, or, layers' matrices,
    left for `gather_once` to gather layer by layer, or for `take_apart`."""
    if record.is_stacked and not record.is_matrix:
        return _all_layers(record, part)
    parameter = gather_on_use(record, part)
    return parameter if record.is_stacked else materialize(parameter)


def _all_layers(record: ParamSpec, part: Array) -> Array:
    """A stack gathered in one go."""
    assert record.gather_dtype is not None
    return materialize(GatherOnUse(part, record.axes, record.grad_reduction, record.gather_dtype, record.gather_dtype))  # pyright: ignore[reportReturnType]


def gather_for_step(records: Tree, wrapped: Tree) -> Tree:
    """Wrapped parameters with those of ZeRO-1 and 2 gathered that still are to be, stacks one layer after the other.

    Those that are left to the loop over the layers stay as they are.

    All at once, every gather would need a buffer of its own besides the parameters: its result comes with the split
    dimension outermost, and is transposed.
    """
    leaves, tree = jax.tree.flatten(wrapped, is_leaf=is_wrapped)
    table = jax.tree.leaves(records)
    stacks = sharded_stacks(table)
    waiting = {i for i, r in enumerate(table) if r.is_gathered_per_step and _waits(_parameter(leaves[i]))}
    for members in stacks:
        if own := [i for i in members if i in waiting]:
            for i, array in zip(own, gather_layers([_parameter(leaves[i]) for i in own]), strict=True):
                leaves[i] = replace(leaves[i], array=array) if isinstance(leaves[i], ReduceGradOnUse) else array
    for i in waiting.difference(*stacks):
        leaves[i] = materialize(leaves[i])
    return jax.tree.unflatten(tree, leaves)


def _waits(parameter: Any) -> bool:
    return isinstance(parameter, GatherOnUse) and not parameter.keep_for_backward


def _parameter(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, ReduceGradOnUse) else leaf


def materialize_outside_stacks(records: Tree, wrapped: Tree) -> Tree:
    """Wrapped parameters outside the stacks as arrays; a stack's are resolved where the model scans over its layers."""
    return jax.tree.map(lambda record, leaf: leaf if record.is_stacked else materialize(leaf), records, wrapped)
