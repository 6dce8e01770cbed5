"""The layers of a scan with prefetch: which of their parameters are gathered, and how their gradients are reduced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.layout.layouts import NOT_SHARDED
from mtjax.sharding.axes import spec, varying_like
from mtjax.sharding.gradients import add_to_layer
from mtjax.sharding.param_comm import (
    LayerInputs,
    ReplicatedParam,
    ShardedParam,
    communicated,
    gather,
    index_layer,
    reduce_gradient,
)
from mtjax.sharding.trainable import NoGrad
from mtjax.sharding.zero import gather_layer

Tree = Any
Run = Callable[..., tuple[Array, Tree]]


@dataclass(frozen=True, eq=False)
class PrefetchLoop:
    """The static description of the loop; it holds no arrays."""

    prefetched: Sequence[ShardedParam | ReplicatedParam]
    """The prefetched parameters, without their arrays."""
    is_trainable: Sequence[bool]
    run: Run
    """(hidden states, prefetched parameters, other parameters, number, constants ...) -> (hidden states, state)."""
    saving: Callable[[Run], Run]
    adds_up: bool
    """Whether there are gradients of earlier microbatches."""

    @classmethod
    def of(cls, prefetched: Sequence[Any], run: Run, saving: Callable[[Run], Run], adds_up: bool) -> "PrefetchLoop":
        """Describes the loop over a stack with these prefetched parameters."""
        leaves = [_without_arrays(leaf) for leaf in map(communicated, prefetched) if leaf is not None]
        return cls(leaves, [not isinstance(leaf, NoGrad) for leaf in prefetched], run, saving, adds_up)

    @property
    def saves_gathered(self) -> bool:
        """Whether the backward pass reads what the forward pass gathered."""
        return any(isinstance(like, ShardedParam) and like.keep_for_backward for like in self.prefetched)

    def gather(self, shards: list[Array], index: Any) -> list[Array]:
        """All-gathers the sharded parameters of a layer.

        Args:
          shards: [layers, ...] of each prefetched parameter.
          index: of the layer.

        Returns:
          [...] of each prefetched parameter that is a `ShardedParam`, in full.
        """
        of_layer = zip(self.prefetched, index_layer(shards, index), strict=True)
        wrapped = [replace(like, shard=shard) for like, shard in of_layer if isinstance(like, ShardedParam)]
        # What is saved for the backward pass is row-major, as the gather's layout would spread to the stack of it.
        if not self.saves_gathered:
            return [gather(each) for each in wrapped]
        with jax.named_scope("parameters"):
            return [gather_layer(each) for each in wrapped]

    def of_layer(self, gathered: list[Array], shards: list[Array], index: Any) -> list[Any]:
        """Returns all prefetched parameters of a layer: `gathered` ones, and the replicated ones from their stacks."""
        arrays, gathered_iter = index_layer(shards, index), iter(gathered)
        pairs = zip(self.prefetched, arrays, strict=True)
        return [
            _parameter_of(like, next(gathered_iter) if isinstance(like, ShardedParam) else array)
            for like, array in pairs
        ]

    def regathered(self, parameters: list[Any]) -> list[Array]:
        """Selects the parameters that the backward pass regathers, or reads once more from their stacks."""
        pairs = zip(self.prefetched, map(_array_of, parameters), strict=True)
        return [array for like, array in pairs if not (isinstance(like, ShardedParam) and like.keep_for_backward)]

    def unreduced(self, gradients: list[Any]) -> list[Array]:
        """Returns a layer's local gradients as slots hold them: in their own type, or in the reduction's if it has
        fewer bits. Frozen parameters have none."""
        # XLA: in float32 it would copy them in each iteration, as the reduction reads the slot of one layer while the
        # backward pass of the next writes it. Cast by the reduction, they are read before.
        whole = [g if isinstance(g, Array) else g.carrier for g in gradients]
        of_layer = zip(self.prefetched, whole, self.is_trainable, strict=True)
        return [_narrow(gradient, like.reduction.comm_dtype) for like, gradient, is_trained in of_layer if is_trained]

    def reduce_into(self, sums: list[Array], gradients: list[Array], index: Any) -> list[Array]:
        """Reduces (-scatters) the gradients of a layer over ranks, and writes them to their accumulators.

        Args:
          sums: accumulators of the trainable prefetched parameters, float32 [layers, ...], this rank's shards.
          gradients: `unreduced` ones of one layer.
          index: of the layer.

        Returns:
          The accumulators.
        """
        trainable = [
            like for like, is_trainable in zip(self.prefetched, self.is_trainable, strict=True) if is_trainable
        ]
        # XLA: arithmetic would be computed in each kernel that reads or writes a layer, which then are not one: see
        # `add_to_layer`.
        index = lax.optimization_barrier(index)

        def one(accumulator: Array, gradient: Array, like: ShardedParam | ReplicatedParam) -> Array:
            """Reduces one parameter's gradient [...] into its accumulator [layers, ...]."""
            layer_spec = spec(*like.names) if isinstance(like, ShardedParam) else like.compute_spec
            # XLA: an all-reduce whose result is added to an array that a loop carries is moved after the loop, and so
            # not overlapped. The first microbatch may overwrite the zeros instead.
            put = set_layer if like.reduction.dim == NOT_SHARDED and not self.adds_up else add_to_layer
            return put(accumulator, reduce_gradient(gradient, layer_spec, like.reduction), index)

        return [one(*each) for each in zip(sums, gradients, trainable, strict=True)]


def set_layer(stack: Array, value: Array, index: Any) -> Array:
    """Overwrites one layer of a stack [layers, ...] with `value` [...]; `index` is from 0."""
    return lax.dynamic_update_index_in_dim(stack, value, index, 0, allow_negative_indices=False)


def flattened(run: Run, tree: Any, is_prefetched: Sequence[bool]) -> Run:
    """Returns a layer function whose parameters are lists of arrays, prefetched and others, instead of a module."""

    def run_flat(x: Array, prefetched: list[Array], resident: list[Any], number: Array) -> tuple[Array, Tree]:
        prefetched_iter, resident_iter = iter(prefetched), iter(resident)
        layer = jax.tree.unflatten(tree, [next(prefetched_iter if flag else resident_iter) for flag in is_prefetched])
        return run(x, LayerInputs(layer, number))

    return run_flat


def traced(
    run: Run, variants: Sequence[tuple[Callable[[Run], Run], int]], example: tuple[Any, ...]
) -> tuple[list[Run], list[list[Array]], list[tuple[int, int]]]:
    """Traces each variant of a layer once.

    Returns:
      Functions that close over no tracers; the arrays that each of them has as further arguments; and for each loop,
      which function it runs, and its number of layers.
    """
    # `_step`, a custom_vjp, may not close over tracers such as attention's mask: those of `run` become arguments.
    closed: dict[Callable[[Run], Run], Any] = {}
    for wrap in dict(variants):
        closed[wrap] = jax.closure_convert(wrap(run), *example)
    numbers_of_variants = {wrap: variant_number for variant_number, wrap in enumerate(closed)}
    functions, constants = zip(*closed.values(), strict=True)
    return list(functions), list(constants), [(numbers_of_variants[wrap], count) for wrap, count in variants]


def scan_but_last(
    iteration: Callable[[int, Tree, Any], tuple[Tree, Tree]],
    carry: Tree,
    parts: Sequence[tuple[int, int]],
    numbers: Array,
) -> tuple[Tree, list[Tree]]:
    """Runs all layers but the last, a loop for each part; returns the carry, and the states of each loop."""
    states, first, last = [], 0, len(numbers) - 1
    for variant, count in parts:
        end = min(first + count, last)
        if end > first:
            indices = jnp.arange(end - first) + first if first else jnp.arange(end)
            carry, state = lax.scan(partial(iteration, variant), carry, (indices, numbers[first:end]))
            states.append(state)
        first = end
    return carry, states


def stack_of(leaf: ShardedParam | ReplicatedParam) -> Array:
    """Returns the stacked array, [layers, ...], that a layer is taken from: this rank's shards, or all of it."""
    if isinstance(leaf, ShardedParam):
        return leaf.sent
    return leaf.parameter if isinstance(leaf.parameter, Array) else leaf.parameter.values


@partial(jax.tree_util.register_dataclass, data_fields=["saved"], meta_fields=["tree", "indices"])
@dataclass(frozen=True)
class VjpWithoutParameters:
    """A vjp function, which is a pytree of its residuals, without a layer's gathered parameters."""

    saved: list[Any]
    tree: Any
    indices: tuple[int | None, ...]
    """Of each array of the vjp function: which parameter it is; None of those in `saved`."""

    @classmethod
    def without(cls, vjp: Any, parameters: list[Array]) -> "VjpWithoutParameters":
        """Takes `parameters` out of a vjp function, where it saves the very same tracer."""
        arrays, tree = jax.tree.flatten(vjp)
        # By identity, not by value: a residual that is computed from a parameter, such as its transpose, stays a
        # residual.
        indices = [next((i for i, p in enumerate(parameters) if p is array), None) for array in arrays]
        saved = [array for array, index in zip(arrays, indices, strict=True) if index is None]
        return cls(saved, tree, tuple(indices))

    def of(self, parameters: list[Array]) -> Any:
        """Rebuilds the vjp function with these parameters, which were regathered."""
        saved = iter(self.saved)
        return jax.tree.unflatten(self.tree, [next(saved) if i is None else parameters[i] for i in self.indices])


def zeros_like(arrays: list[Array]) -> list[Array]:
    """Builds zeros with the shapes, types, shardings and varying axes of `arrays`."""

    def zeros(like: Array) -> Array:
        kind = jax.typeof(like)
        return varying_like(jnp.zeros(kind.shape, kind.dtype, out_sharding=kind.sharding.spec), like)

    return [zeros(array) for array in arrays]


def partition(items: Sequence[Any], is_first: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Divides items by a predicate: those of which `is_first` holds, and the remaining ones."""
    pairs = list(zip(items, is_first, strict=True))
    return [item for item, first in pairs if first], [item for item, first in pairs if not first]


def _without_arrays(leaf: ShardedParam | ReplicatedParam) -> ShardedParam | ReplicatedParam:
    """Returns what a wrapped parameter says of its communication and types: static, and so hashable."""
    if isinstance(leaf, ShardedParam):
        return replace(leaf, shard=None, cast=())
    # A matrix in 8 bits keeps its type and rule, without its numbers.
    kept = None if isinstance(leaf.parameter, Array) else replace(leaf.parameter, values=None)
    return replace(leaf, parameter=kept, shard=None)


def _parameter_of(like: ShardedParam | ReplicatedParam, array: Array) -> Any:
    """Returns a layer's parameter: the array, or the matrix in 8 bits with zeros to differentiate by."""
    if isinstance(like, ShardedParam):
        full = like.in_full(array)
        return full if isinstance(full, Array) else full.with_carrier()
    return array if like.parameter is None else replace(like.parameter, values=array).with_carrier()


def _narrow(gradient: Array, dtype: str) -> Array:
    return gradient.astype(dtype) if jnp.dtype(dtype).itemsize < gradient.dtype.itemsize else gradient


def _array_of(parameter: Any) -> Array:
    return parameter if isinstance(parameter, Array) else parameter.values
