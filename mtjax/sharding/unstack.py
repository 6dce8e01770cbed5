"""Unstacks parameters, [layers, ...], into an array per layer, for layers that are unrolled instead of scanned.

A `lax.scan` over layers copies each layer's residuals into stacked arrays, and out of them in the backward pass.
Unrolled layers save no copies. Between steps parameters stay stacked: they are unstacked once per step, before the
first microbatch, matrices in the compute type, so that they are cast once per step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from mtjax.config.adapters import PARTS
from mtjax.sharding.axes import num_shards, sequence_is_sharded
from mtjax.sharding.gradients import Accumulate, LossFunction, LossSums, zeros_like_shards
from mtjax.sharding.param_comm import ReplicatedParam, ShardedParam, differentiable_shards, gather, materialize
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.trainable import NoGrad
from mtjax.sharding.zero import StepReduction

Tree = Any
T = TypeVar("T")


def can_be_apart(outputs: Sequence[str | None]) -> bool:
    """Returns whether a fused product may be several: not with tensor parallelism, which reduces the gradient of its
    input once; `outputs` are the logical names of its output dimensions."""
    is_fused = len(outputs) > 1 and outputs[0] in PARTS and outputs[1] is not None
    return is_fused and num_shards(outputs[1]) == 1 and not sequence_is_sharded()  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class AccumulateUnrolled(Accumulate):
    """Accumulates gradients of layers that are unrolled instead of scanned."""

    compute_dtype: str = "float32"
    """Type of the copy of their matrices that they read."""
    is_float8: bool = False
    """Whether layers multiply in 8 bits."""

    def gradients(
        self, loss_function: LossFunction, parameters: Tree, batch: Tree, step_reduction: StepReduction
    ) -> tuple[LossSums, Tree]:
        """See `Accumulate.gradients`."""
        losses, gradients = super().gradients(loss_function, parameters, batch, step_reduction)
        return losses, restack(gradients)

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """Unstacks the parameters of layers."""
        how = {"dtype": self.compute_dtype, "is_float8": self.is_float8}
        return jax.tree.map(lambda r, leaf: unstack(r, leaf, **how) if r.is_stacked else leaf, records, wrapped)

    def zeros(self, records: Tree, wrapped: Tree, shards: Tree) -> Tree:
        """See `Accumulate.zeros`."""
        # XLA: accumulating a matrix where it is used fuses the addition into the product. For vectors each addition
        # would be a kernel, so they are accumulated stacked.
        stacked = differentiable_shards(wrapped)
        return zeros_like_shards(
            jax.tree.map(lambda r, stack, layers: layers if r.is_matrix else stack, records, stacked, shards)
        )

    def add(self, records: Tree, accumulators: Tree, gradients: Tree) -> Tree:
        """See `Accumulate.add`."""
        # Matrices have an accumulator per layer, vectors a stacked one (`zeros`).
        alike = lambda _, total, gradient: gradient if _is_layer_list(total) else restack(gradient)  # noqa: E731
        return super().add(records, accumulators, jax.tree.map(alike, records, accumulators, gradients))

    def adds_in_backward(self, record: ParamSpec) -> bool:
        """See `Accumulate.adds_in_backward`: there is no loop to add in."""
        return False


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=[])
@dataclass(frozen=True)
class LayerList:
    """An unstacked parameter."""

    layers: tuple[Any, ...]
    """An array of each layer, or a wrapped parameter of `mtjax.sharding.param_comm`."""


def unstack(record: ParamSpec, stack: Any, dtype: str, *, is_float8: bool = False) -> LayerList:
    """Unstacks a parameter.

    Args:
      record: of the parameter.
      stack: [layers, ...], an array or a wrapped parameter.
      dtype: compute type, to which matrices are cast.
      is_float8: whether layers multiply in 8 bits: then ZeRO-3 gathers a matrix as it does in a loop over layers.
    """

    def take(stack: Any, i: int) -> Any:
        """Takes layer i out of an array or a `ShardedParam`, gathered or cast; ZeRO-3's stays wrapped."""
        layer = jax.tree.map(lambda array: jax.lax.index_in_dim(array, i, keepdims=False), stack)
        if isinstance(layer, ShardedParam) and record.is_gathered_per_step:
            # ZeRO-1 and 2: gathered here, once per step. ZeRO-3's are gathered by each pass of a layer.
            return layer.in_full(_gathered(layer))
        if isinstance(layer, ShardedParam):
            return _for_unrolled(layer) if record.is_matrix and not is_float8 else layer
        return layer.astype(dtype) if record.is_matrix and isinstance(layer, jax.Array) else layer

    def layer(i: int) -> Any:
        """Unstacks layer i, with its wrapper."""
        if isinstance(stack, NoGrad):
            return NoGrad(take(stack.parameter, i))
        # Each layer's gradient is reduced, or cast, as soon as its backward pass has computed it.
        if isinstance(stack, ReplicatedParam):
            shard = jax.lax.index_in_dim(stack.shard, i, keepdims=False)
            return replace(stack, parameter=take(stack.parameter, i), shard=shard)
        # The full array is read by the layer; the shard receives the reduce-scattered gradient.
        if isinstance(stack, ShardedParam) and stack.keep_for_backward:
            kept = jax.tree.map(lambda array: jax.lax.index_in_dim(array, i, keepdims=False), stack)
            return kept.with_gathered(_gathered(kept))
        return take(stack, i)

    with jax.named_scope("parameters"):
        return LayerList(tuple(layer(i) for i in range(record.shape[0])))


def _gathered(layer: ShardedParam) -> jax.Array:
    """All-gathers a layer's parameter, in 8 bits if it is quantized."""
    return gather(layer) if layer.is_quantized else materialize(layer)  # pyright: ignore[reportReturnType]


def _for_unrolled(layer: ShardedParam) -> ShardedParam:
    """Returns a layer's parameter of ZeRO-3 as unrolled layers gather it: cast once per step, and part by part."""
    split_dim = next((i for i, name in enumerate(layer.names) if name in PARTS), None)
    if split_dim is not None and (split_dim == layer.reduction.dim or not can_be_apart(layer.names[split_dim:])):
        split_dim = None
    # XLA: its gradient is computed in the type in which it is sent, so XLA adds no cast in front of the products that
    # read it.
    dtype = "float32" if layer.reduction.comm_dtype == "float32" else layer.dtype
    # The master copy stays out of the layer, or all of its slices would be alive from the forward to the backward pass.
    shard = lax.stop_gradient(layer.gather_input)
    pieces = [shard] if split_dim is None else jnp.split(shard, shard.shape[split_dim], axis=split_dim)
    narrow_shards = tuple(piece.astype(layer.gather_dtype) for piece in pieces)
    return replace(layer, narrow_shards=narrow_shards, dtype=dtype, split_dim=split_dim)


def restack(tree: Tree) -> Tree:
    """Stacks the gradients of unstacked parameters: `LayerList` -> [layers, ...]; other gradients are unchanged."""

    def one(leaf: Any) -> Any:
        if not _is_layer_list(leaf):
            return leaf
        with jax.named_scope("gradients"):
            return jnp.stack(leaf.layers)

    return jax.tree.map(one, tree, is_leaf=_is_layer_list)


def unstacked_layers(layers: T) -> list[T] | None:
    """Returns the parameters of each layer if they are unstacked; None if they are stacked."""
    lists = [leaf for leaf in jax.tree.leaves(layers, is_leaf=_is_layer_list) if _is_layer_list(leaf)]
    if not lists:
        return None
    return [
        jax.tree.map(lambda leaf, i=i: leaf.layers[i], layers, is_leaf=_is_layer_list)
        for i in range(len(lists[0].layers))
    ]


def _is_layer_list(leaf: Any) -> bool:
    return isinstance(leaf, LayerList)
