"""ZeRO (arXiv 1910.02054): shards parameters, gradients and optimizer state over the data-parallel ranks.

Stage 1 shards the optimizer state and the float32 parameters, which are the master copy; stage 2 also the gradients.
Stage 3 (FSDP) all-gathers each layer's parameters for each use, where 1 and 2 gather all of them once per step. A
parameter is sharded along one of its dimensions, which its `ParamSpec` names.

A gradient is reduced over the mesh axes that replicate its parameter, in the type of `grad_reduce_dtype`. Usually that
happens once per step, after the last microbatch. It happens inside the backward pass, layer by layer, where the
remaining backward pass can overlap it (a single microbatch), and where full gradients must never exist (ZeRO-2 and 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mtjax.layout.layouts import NOT_SHARDED
from mtjax.sharding.axes import explicit_only, map_shards, spec, varying_axes
from mtjax.sharding.param_comm import (
    GradReduction,
    ReplicatedParam,
    ShardedParam,
    all_gather_manual,
    index_layer,
    is_wrapped,
    materialize,
    reduce_gradient,
    row_major,
)
from mtjax.sharding.param_specs import ParamSpec, sharded_stacks

Tree = Any

NO_REDUCTION = GradReduction((), NOT_SHARDED, (), 1)
"""Reduces over no axis; the gradient is still cast to float32."""


@dataclass(frozen=True)
class StepReduction:
    """Decides, for one step, which gradients are reduced inside the backward pass (`wrap`), and which after the last
    microbatch (`finish`)."""

    records: Tree
    """The `ParamSpec` of each parameter."""
    zero: int
    """ZeRO's stage."""
    num_microbatches: int
    """Of the step."""
    stages: int = 1
    """Of the pipeline. With several stages the backward pass runs once per tick of the timetable, idle ticks included,
    so a reduction inside it would run too often."""

    def wrap(self, parameters: Tree) -> Tree:
        """Wraps parameters for differentiation: some gather themselves, or reduce their gradients, where they are used.

        Each becomes a `ShardedParam`, which is gathered; a `ReplicatedParam`, perhaps of a `ShardedParam`, whose
        gradient is reduced in the backward pass or only cast to float32; or it stays a float32 array, whose gradient
        `finish` reduces.

        Args:
          parameters: sharded as `storage_spec`, and varying over the axes over which the batch does.
        """

        def wrap_one(record: ParamSpec, array: Array) -> Any:
            """Wraps one parameter."""
            # ZeRO-3: gathered for each use, its gradient reduce-scattered.
            if record.gather_dtype is not None and not record.is_gathered_per_step:
                return wrap_gathered_on_use(record, array)
            can_keep = record.is_gathered_per_step and record.is_sharded_within_layers
            if can_keep and self.num_microbatches == self.stages == 1:
                # ZeRO-1 and 2, one microbatch: gathered once for both passes, overlapped with the layers before
                # (`mtjax.sharding.prefetch`).
                return wrap_gathered_on_use(record, array, keep_for_backward=True)
            # Otherwise ZeRO-1 and 2 gather once per step, for all microbatches (`gather_for_step`).
            parameter = wrap_or_gather_for_step(record, array) if record.is_gathered_per_step else array
            # Master weights in the compute type: outside stacks consumers read float32, as of float32 ones.
            dtype = None if record.is_stacked or record.dtype == "float32" else "float32"
            shape, reduction, layer_reduction = array.shape, record.grad_reduction, record.layer_grad_reduction
            if not self.is_reduced_in_backward(record):
                if not isinstance(parameter, ShardedParam) and parameter.dtype == jnp.float32:
                    return parameter  # `finish` reduces its gradient
                # Reduced after the last microbatch, but accumulated in float32: the gradient has the full shape.
                shape = [n * reduction.num_shards if i == reduction.dim else n for i, n in enumerate(shape)]
                reduction = layer_reduction = NO_REDUCTION
            # Autodiff gives a cotangent the shape of its primal. The reduced gradient has the shape of a shard, so the
            # function is differentiated by zeros of that shape, not by the parameter.
            zeros = zeros_like_reduced(shape, array, record, reduction)
            return ReplicatedParam(parameter, zeros, spec(*record.layer_logical_axes), layer_reduction, dtype)

        return jax.tree.map(wrap_one, self.records, parameters)

    def is_reduced_in_backward(self, record: ParamSpec) -> bool:
        """Returns whether a gradient is reduced over ranks inside the backward pass of each microbatch."""
        # ZeRO-2 and 3 accumulate shards, so each microbatch's gradients are reduce-scattered. Otherwise gradients are
        # accumulated locally and reduced once, except where one microbatch allows to overlap the reduction.
        if self.zero >= 2 and not record.is_read_every_tick:
            return record.has_zero_dimension
        inside = record.is_stacked and (not self.zero or record.is_sharded_within_layers)
        inside = inside and not record.grad_reduction.is_maximum
        return inside and self.num_microbatches == self.stages == 1 and bool(record.grad_reduction.axes)

    def finish(self, gradients: Tree) -> Tree:
        """Reduces the gradients that the backward pass has not reduced, and those of parameters that stages share.

        Args:
          gradients: float32, in the shapes of the arrays that `wrap` differentiates by; local to each rank's samples
            where they are not reduced yet.

        Returns:
          The reduced gradients, sharded as `storage_spec`.
        """
        # Stacks sharded within layers are reduced layer by layer, all other gradients one by one. In the backward pass,
        # all or none of a group of stacks: what is sharded within layers is reduced there alike.
        leaves, tree = jax.tree.flatten(gradients)
        leaf_records = jax.tree.leaves(self.records)
        stacks = [s for s in sharded_stacks(leaf_records) if not self.is_reduced_in_backward(leaf_records[s[0]])]
        for i in set(range(len(leaves))).difference(*stacks):
            if not self.is_reduced_in_backward(leaf_records[i]):
                leaves[i] = reduce_gradient(leaves[i], leaf_records[i].compute_spec, leaf_records[i].grad_reduction)
        # XLA: a reduce-scatter needs its sharded dimension outermost. Of an entire stack it would make a second,
        # transposed copy; layer by layer that copy is of one layer.
        for members in stacks:
            specs = [leaf_records[i].compute_spec for i in members]
            reductions = [leaf_records[i].grad_reduction for i in members]
            reduced = scatter_layers([leaves[i] for i in members], reductions, specs)
            for i, leaf in zip(members, reduced, strict=True):
                leaves[i] = leaf
        # Each sharding group has the sum of its samples. Of parameters that several stages have, such as a tied
        # embedding, each stage has a partial sum.
        for i, record in enumerate(leaf_records):
            for axes in filter(None, (record.between_groups, record.deferred_axes)):
                deferred = GradReduction(axes, NOT_SHARDED, (), 1, record.grad_reduction.comm_dtype)
                leaves[i] = reduce_gradient(leaves[i], record.storage_spec, deferred)
        return jax.tree.unflatten(tree, leaves)


def zeros_like_reduced(shape: Sequence[int], like: Array, record: ParamSpec, reduction: GradReduction) -> Array:
    """Builds float32 zeros like a rank's reduced gradient, to differentiate by; `like` varies over the mesh axes over
    which the gradient varies before the reduction."""
    zeros = jnp.zeros(shape, jnp.float32, out_sharding=explicit_only(record.compute_spec))
    # An all-reduce makes values equal over its axes; a reduce-scatter leaves them different over its shard axes.
    axes = tuple(axis for axis in varying_axes(like) if axis in reduction.shard_axes or axis not in reduction.axes)
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


# --- gathers parameters


def gather_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Gathers parameters, sharded as `storage_spec`, for a model that is not differentiated; those of stacks stay
    wrapped, for `materialize`."""
    return materialize_outside_stacks(records, wrap_for_inference(records, parameters))


def wrap_for_inference(records: Tree, parameters: Tree) -> Tree:
    """Wraps sharded parameters, without gradients, in `ShardedParam`; `materialize` gathers them."""
    return jax.tree.map(
        lambda r, array: array if r.gather_dtype is None else wrap_gathered_on_use(r, array), records, parameters
    )


def wrap_gathered_on_use(record: ParamSpec, shard: Array, keep_for_backward: bool = False) -> ShardedParam | Array:
    """Wraps a parameter's shard, [layers, ...] for one of a stack, so that it is gathered where it is used: for each
    pass, or once for both. Where ranks hold different layers, returns the gathered stack instead."""
    assert record.gather_dtype is not None
    if record.is_stacked and not record.is_sharded_within_layers:
        # Each use would need all of these shards.
        return _gather_stack(record, shard)
    # Outside stacks (embeddings, final norm) consumers read float32, and cast themselves.
    dtypes = record.gather_dtype, record.gather_dtype if record.is_stacked else "float32"
    names, reduction = record.layer_logical_axes, record.layer_grad_reduction
    return _as_stored(record, ShardedParam(shard, names, reduction, *dtypes, keep_for_backward))


def _as_stored(record: ParamSpec, parameter: ShardedParam) -> ShardedParam:
    """Returns a parameter that is gathered as it is stored, and differentiated by float32 numbers."""
    if record.dtype == "float32":
        return parameter
    from mtjax.sharding.narrow import narrow_shard

    return narrow_shard(parameter)


def wrap_or_gather_for_step(record: ParamSpec, shard: Array) -> ShardedParam | Array:
    """Gathers a sharded parameter for all microbatches of a step; layers' matrices stay wrapped, for
    `gather_for_step` or `unstack`."""
    # Vectors (norms, biases) are small: one collective for all layers costs less than one per layer.
    if record.is_stacked and not record.is_matrix:
        return _gather_stack(record, shard)
    parameter = wrap_gathered_on_use(record, shard)
    if record.is_stacked or not isinstance(parameter, ShardedParam):
        return parameter
    # Outside stacks there is no loop to gather in: once, here. Narrow master weights are cast where they are used.
    return materialize(parameter if record.dtype == "float32" else replace(parameter, dtype=parameter.gather_dtype))


def _gather_stack(record: ParamSpec, shard: Array) -> Array:
    """Gathers a stack in one collective."""
    assert record.gather_dtype is not None
    whole = ShardedParam(shard, record.logical_axes, record.grad_reduction, record.gather_dtype, record.gather_dtype)
    return materialize(_as_stored(record, whole))  # pyright: ignore[reportReturnType]


def gather_for_step(records: Tree, wrapped: Tree) -> Tree:
    """All-gathers the parameters of ZeRO-1 and 2 once, for all microbatches of a step.

    Args:
      records: of each parameter.
      wrapped: parameters as `StepReduction.wrap` or `wrap_for_inference` returns them, stacked ones [layers, ...].

    Returns:
      The same tree; where a parameter was a `ShardedParam` of ZeRO-1 or 2, alone or inside a `ReplicatedParam`, it is
      the gathered array in `gather_dtype`, or a `QuantizedWeight` of it. Those that the loop over layers gathers
      (`keep_for_backward`), and ZeRO-3's, stay wrapped.
    """
    leaves, tree = jax.tree.flatten(wrapped, is_leaf=is_wrapped)
    leaf_records = jax.tree.leaves(records)
    stacks = sharded_stacks(leaf_records)
    inner = [leaf.parameter if isinstance(leaf, ReplicatedParam) else leaf for leaf in leaves]
    pending = {
        i: p
        for i, (p, record) in enumerate(zip(inner, leaf_records, strict=True))
        if record.is_gathered_per_step and isinstance(p, ShardedParam) and not p.keep_for_backward
    }
    # XLA: an all-gather returns its sharded dimension outermost and then transposes, in another buffer. Layer by layer
    # that buffer is of one layer.
    for members in stacks:
        if here := [i for i in members if i in pending]:
            for i, array in zip(here, gather_layers([pending[i] for i in here]), strict=True):
                full = pending[i].in_full(array)
                leaves[i] = replace(leaves[i], parameter=full) if isinstance(leaves[i], ReplicatedParam) else full
    for i in set(pending).difference(*stacks):
        leaves[i] = materialize(leaves[i])
    return jax.tree.unflatten(tree, leaves)


def materialize_outside_stacks(records: Tree, wrapped: Tree) -> Tree:
    """Materializes wrapped parameters outside the stacks; those of stacks are where the model scans over layers."""
    return jax.tree.map(lambda record, leaf: leaf if record.is_stacked else materialize(leaf), records, wrapped)


# --- one layer after the other, so that buffers of one layer suffice


def gather_layers(stacks: list[ShardedParam]) -> list[Array]:
    """All-gathers stacked parameters in their `gather_dtype`, one layer after the other; they are sharded within
    layers, [layers, ...] each, and all have the same number of layers."""

    def gather_one(index: ArrayLike) -> list[Array]:
        with jax.named_scope("parameters"):
            return [gather_layer(index_layer(stack, index)) for stack in stacks]

    return _layer_by_layer(gather_one, len(stacks[0].shard))


def gather_upfront(layers: Tree) -> Tree:
    """Gathers a stack's parameters with `keep_for_backward`, [layers, ...] each, for a loop without prefetch."""
    leaves, tree = jax.tree.flatten(layers, is_leaf=is_wrapped)
    once = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, ShardedParam) and leaf.keep_for_backward}
    if once:
        arrays = gather_layers([lax.stop_gradient(leaf) for leaf in once.values()])
        for (i, leaf), array in zip(once.items(), arrays, strict=True):
            leaves[i] = leaf.with_gathered(array)
    return jax.tree.unflatten(tree, leaves)


def gather_layer(parameter: ShardedParam) -> Array:
    """All-gathers one layer's parameter, which has no leading `layers`, in row-major memory layout."""
    # XLA: the layout of the result would spread to the stack into which it is written, too. A constraint on an array
    # with explicit axes makes the partitioner gather it, so all are manual.
    gather = map_shards(lambda a: row_major(all_gather_manual(parameter, a)), spec(*parameter.names))
    return gather(parameter.gather_input)


def scatter_layers(gradients: list[Array], reductions: list[GradReduction], specs: list[PartitionSpec]) -> list[Array]:
    """Reduce-scatters stacked gradients one layer after the other.

    Args:
      gradients: [layers, ...] each, local to a rank's samples.
      reductions: of each, `layers` counted among the dimensions.
      specs: sharding of each before the reduction.

    Returns:
      This rank's shards of the reduced gradients, float32 [layers, ...].
    """

    def reduce_layer(index: ArrayLike) -> list[Array]:
        of_layer = zip(index_layer(gradients, index), specs, reductions, strict=True)
        return [reduce_gradient(a, PartitionSpec(*spec[1:]), replace(r, dim=r.dim - 1)) for a, spec, r in of_layer]

    return _layer_by_layer(reduce_layer, gradients[0].shape[0])


def _layer_by_layer(compute: Callable[[ArrayLike], list[Array]], count: int) -> list[Array]:
    """Stacks the results of `compute(index)` for `count` layers, computed one after the other."""

    def one(index: Array, stacks: list[Array]) -> list[Array]:
        return [lax.dynamic_update_index_in_dim(s, a, index, 0) for s, a in zip(stacks, compute(index), strict=True)]

    # XLA: zeros depend on nothing, so they would be allocated at the beginning of the step and be alive through its
    # memory peak. The stacks begin as copies of the first layer's result instead.
    return lax.fori_loop(1, count, one, [jnp.broadcast_to(a, (count, *a.shape)) for a in compute(0)])
