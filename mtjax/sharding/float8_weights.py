"""Weights quantized once a step, for all microbatches and passes: ZeRO gathers them in 8 bits."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.sharding.axes import spec
from mtjax.sharding.float8 import E4M3, QuantizedWeight, quantized
from mtjax.sharding.param_comm import ReplicatedParam, ShardedParam, gather
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.zero import NO_REDUCTION, StepReduction, zeros_like_reduced

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["master", "values"], meta_fields=[])
@dataclass(frozen=True)
class MasterAndValues:
    """A stack of matrices as they are stored and in 8 bits, with the same sharding."""

    master: Any
    values: Any


def quantize_stack(
    stack: Float[Array, "layers ..."], scale: Float[Array, " layers"], compute_dtype: str
) -> MasterAndValues:
    """Quantizes a stack of matrices, each with its scale.

    Args:
      stack: float32, or in the compute type; sharded in any way.
      scale: of each layer.
      compute_dtype: to which products would cast the matrices: they are rounded to it first.
    """
    with jax.named_scope("parameters"):
        of_layers = scale.reshape(-1, *(1,) * (stack.ndim - 1))
        return MasterAndValues(stack, quantized(stack.astype(compute_dtype), E4M3, of_layers))


class Float8Reduction(StepReduction):
    """The reduction of a step whose layers read matrices in 8 bits: their gradients are those of the matrices."""

    def wrap(self, parameters: Tree) -> Tree:
        """Wraps parameters, some of them `MasterAndValues`: see `StepReduction.wrap`."""

        def is_pair(leaf: Any) -> bool:
            return isinstance(leaf, MasterAndValues)

        masters = jax.tree.map(lambda leaf: leaf.master if is_pair(leaf) else leaf, parameters, is_leaf=is_pair)

        def one(record: ParamSpec, leaf: Any, wrapped: Any) -> Any:
            return self._quantized(record, _of_all_layers(record, leaf), wrapped) if is_pair(leaf) else wrapped

        return jax.tree.map(one, self.records, parameters, super().wrap(masters))

    def _quantized(self, record: ParamSpec, pair: MasterAndValues, wrapped: Any) -> Any:
        """Replaces what products read of a wrapped matrix by the matrix in 8 bits."""
        if isinstance(wrapped, ShardedParam):
            # The float32 shard stays: the gradient is that of the master weight.
            return replace(wrapped, gather_dtype=jnp.dtype(E4M3).name, narrow_shards=(pair.values,))
        if isinstance(wrapped, ReplicatedParam):
            full = wrapped.parameter
            if isinstance(full, ShardedParam):
                return replace(wrapped, parameter=self._quantized(record, pair, full))
            return replace(wrapped, parameter=QuantizedWeight(pair.values, full.dtype.name))
        zeros = zeros_like_reduced(wrapped.shape, wrapped, record, NO_REDUCTION)
        weight = QuantizedWeight(pair.values, wrapped.dtype.name)
        return ReplicatedParam(weight, zeros, spec(*record.layer_logical_axes), NO_REDUCTION)


def _of_all_layers(record: ParamSpec, pair: MasterAndValues) -> MasterAndValues:
    """Gathers the 8 bits where ZeRO-1 gives ranks different layers, as a loop over layers reads all of them."""
    if record.gather_dtype is None or record.is_sharded_within_layers:
        return pair
    kind = jnp.dtype(E4M3).name
    return replace(
        pair, values=gather(ShardedParam(pair.values, record.logical_axes, record.grad_reduction, kind, kind))
    )
