"""ZeRO (arXiv 1910.02054): shards parameters, gradients and optimizer state over the data-parallel ranks.

Stage 1 shards the optimizer state and the float32 parameters, which are the master copy; stage 2 also the gradients.
Stage 3 (FSDP) all-gathers each layer's parameters for each use, where 1 and 2 gather all of them once per step. A
parameter is sharded along one of its dimensions, which its `ParamSpec` names. This module gathers sharded parameters;
`mtjax.sharding.reduction` reduces their gradients.
"""

from dataclasses import replace
from typing import Any

import jax
from jax import Array

from mtjax.sharding.param_comm import ReplicatedParam, ShardedParam, is_wrapped, materialize
from mtjax.sharding.param_specs import ParamSpec, sharded_stacks
from mtjax.sharding.stacked_collectives import gather_layers

Tree = Any


def gather_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Gathers parameters for a model that is not differentiated; those of stacks stay wrapped, for `materialize`.

    Args:
      records: of each parameter.
      parameters: sharded as `storage_spec`.
    """
    return materialize_outside_stacks(records, wrap_for_inference(records, parameters))


def wrap_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Wraps sharded parameters, without gradients, in `ShardedParam`; `materialize` gathers them."""
    return jax.tree.map(
        lambda r, array: array if r.gather_dtype is None else gather_on_use(r, array), records, parameters
    )


def gather_on_use(record: ParamSpec, shard: Array) -> ShardedParam | Array:
    """Wraps a sharded parameter, so that it is gathered where it is used.

    Args:
      record: of the parameter.
      shard: this rank's, [layers, ...] for one of a stack.

    Returns:
      The wrapped parameter; the gathered array where ranks hold different layers, as each use would need all of them.
    """
    assert record.gather_dtype is not None
    # Outside stacks (embeddings, final norm) consumers read float32, and cast themselves.
    dtype = record.gather_dtype if record.is_stacked else "float32"
    if record.is_stacked and not record.is_sharded_within_layers:
        return _gather_all_layers(record, shard)
    gather_dtype, reduction = record.gather_dtype, record.layer_grad_reduction
    return _as_stored(record, ShardedParam(shard, record.layer_axes, reduction, gather_dtype, dtype))


def gather_and_keep(record: ParamSpec, shard: Array) -> ShardedParam:
    """Wraps a sharded parameter of a stack, so that the loop over layers gathers it once for both passes."""
    assert record.gather_dtype is not None
    dtype, reduction = record.gather_dtype, record.layer_grad_reduction
    return _as_stored(record, ShardedParam(shard, record.layer_axes, reduction, dtype, dtype, keep_for_backward=True))


def _as_stored(record: ParamSpec, parameter: ShardedParam) -> ShardedParam:
    """Returns a parameter that is gathered as it is stored, and differentiated by float32 numbers."""
    if record.dtype == "float32":
        return parameter
    from mtjax.sharding.narrow import narrow_shard

    return narrow_shard(parameter)


def wrap_for_step(record: ParamSpec, shard: Array) -> ShardedParam | Array:
    """Gathers a sharded parameter for all microbatches of a step.

    Layers' matrices stay wrapped: `gather_for_step` gathers them layer by layer, or `unstack` does.
    """
    # Vectors (norms, biases) are small: one collective for all layers costs less than one per layer.
    if record.is_stacked and not record.is_matrix:
        return _gather_all_layers(record, shard)
    parameter = gather_on_use(record, shard)
    if record.is_stacked or not isinstance(parameter, ShardedParam):
        return parameter
    # Outside stacks there is no loop to gather in: once, here. Narrow master weights are cast where they are used.
    return materialize(parameter if record.dtype == "float32" else replace(parameter, dtype=parameter.gather_dtype))


def _gather_all_layers(record: ParamSpec, shard: Array) -> Array:
    """Gathers a stack in one collective."""
    assert record.gather_dtype is not None
    dtype = record.gather_dtype
    whole = ShardedParam(shard, record.axes, record.grad_reduction, dtype, dtype)
    return materialize(_as_stored(record, whole))  # pyright: ignore[reportReturnType]


def gather_for_step(records: Tree, wrapped: Tree) -> Tree:
    """All-gathers the parameters of ZeRO-1 and 2 once, for all microbatches of a step.

    Args:
      records: of each parameter.
      wrapped: parameters as `Reduction.wrap` or `wrap_for_inference` returns them, stacked ones [layers, ...].

    Returns:
      The same tree; each `ShardedParam` of ZeRO-1 and 2 is an array in its `gather_dtype`. Those that the loop over
      layers gathers (`keep_for_backward`), and ZeRO-3's, stay wrapped.
    """
    leaves, tree = jax.tree.flatten(wrapped, is_leaf=is_wrapped)
    table = jax.tree.leaves(records)
    stacks = sharded_stacks(table)
    pending = {i for i, r in enumerate(table) if r.is_gathered_per_step and _is_pending(_parameter(leaves[i]))}
    # XLA: an all-gather returns its sharded dimension outermost and then transposes, in another buffer. Layer by layer
    # that buffer is of one layer.
    for members in stacks:
        if sharded := [i for i in members if i in pending]:
            for i, array in zip(sharded, gather_layers([_parameter(leaves[i]) for i in sharded]), strict=True):
                full = _parameter(leaves[i]).in_full(array)
                leaves[i] = replace(leaves[i], array=full) if isinstance(leaves[i], ReplicatedParam) else full
    for i in pending.difference(*stacks):
        leaves[i] = materialize(leaves[i])
    return jax.tree.unflatten(tree, leaves)


def _is_pending(parameter: Any) -> bool:
    return isinstance(parameter, ShardedParam) and not parameter.keep_for_backward


def _parameter(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, ReplicatedParam) else leaf


def materialize_outside_stacks(records: Tree, wrapped: Tree) -> Tree:
    """Materializes wrapped parameters outside the stacks; those of stacks are where the model scans over layers."""
    return jax.tree.map(lambda record, leaf: leaf if record.is_stacked else materialize(leaf), records, wrapped)
