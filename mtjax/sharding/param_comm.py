"""Communication of parameters where they are used: all-gather forward, reduce(-scatter) of the gradient backward.

`LayerInputs` is what a loop passes to a layer. `materialize`, where the layer uses its parameters, inserts collectives
for those that are gathered for each use, `ShardedParam`, or whose gradient is reduced in the backward pass,
`ReplicatedParam` (`mtjax.sharding.zero` decides which), and returns plain arrays as they are.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec, reshard

from mtjax.layout.layouts import NOT_SHARDED
from mtjax.layout.rules import Axes
from mtjax.sharding.axes import explicit_only, map_shards, non_manual_axes, psum_varying, spec

Tree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class GradReduction:
    """How a gradient is reduced over the ranks that hold the same parameter and see other samples."""

    axes: Axes
    """Mesh axes over which it is reduced; each of degree 2 or more."""
    dim: int
    """Dimension along which the sum is scattered, or `NOT_SHARDED`: every rank gets the entire sum."""
    shard_axes: Axes
    """Those of `axes` over which this dimension is scattered; () when `NOT_SHARDED`."""
    num_shards: int
    """Number of shards along this dimension."""
    comm_dtype: str = "float32"
    """Type in which the collective sends and adds."""
    is_maximum: bool = False
    """Whether the largest gradient is taken, of ranks and microbatches, and not the sum."""


# A pytree in the place of a parameter, so that `lax.scan`, `vmap` and `jax.tree.map` need no code for it.
class WrappedParam:
    """A parameter with communication where it is used."""

    shard: Any
    """What a loss is differentiated by in its place; None if it has no gradient."""

    def materialized(self) -> Any:
        """Returns what products use: an array or a `QuantizedWeight`."""
        raise NotImplementedError

    def with_shard(self, shard: Any) -> Any:
        """Returns the same parameter with another array to differentiate by."""
        return replace(self, shard=shard)  # pyright: ignore[reportArgumentType, reportCallIssue]

    @property
    def communicating(self) -> "ShardedParam | ReplicatedParam | None":
        """The wrapper for which ranks communicate: itself, or None."""
        return self  # pyright: ignore[reportReturnType]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["parameter", "shard"],
    meta_fields=["compute_spec", "reduction", "dtype"],
)
@dataclass(frozen=True)
class ReplicatedParam(WrappedParam):
    """A replicated parameter whose gradient is reduced in the backward pass and returned as that of `shard`."""

    parameter: Any
    """The parameter, perhaps a `QuantizedWeight`, or the `ShardedParam` from which it is gathered once per step."""
    shard: Any
    """float32 zeros in the shape of the reduced gradient, to differentiate by."""
    compute_spec: PartitionSpec
    """Of the parameter where it is used, without the leading `layers`."""
    reduction: GradReduction
    """Of its gradient, without the leading `layers`; it may have no axes, for a parameter in the compute type, whose
    gradient is only cast to float32."""
    dtype: str | None = None
    """Type to which it is cast where it is used; None: as it is."""

    def materialized(self) -> Any:
        """See `WrappedParam.materialized`; its gradient is reduced."""
        if not isinstance(self.parameter, Array):
            return self.parameter.reduced(partial(_reduce_grad, self.compute_spec, self.reduction), self.shard)
        array = self.parameter if self.dtype is None else self.parameter.astype(self.dtype)
        return _reduce_grad(self.compute_spec, self.reduction, array, self.shard)

    @property
    def communicating(self) -> "ReplicatedParam | None":
        """See `WrappedParam.communicating`."""
        return self if self.reduction.axes else None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard", "narrow_shards"],
    meta_fields=["names", "reduction", "gather_dtype", "dtype", "keep_for_backward", "split_dim"],
)
@dataclass(frozen=True)
class ShardedParam(WrappedParam):
    """A rank's shard of a parameter that is all-gathered where it is used; its gradient is reduce-scattered."""

    shard: Any
    names: tuple[str, ...]
    """Logical names of the dimensions where it is used, without the leading `layers`."""
    reduction: GradReduction
    """Of its gradient, without the leading `layers`."""
    gather_dtype: str
    """Type in which it is gathered: the compute type for matrices, or 8 bits for quantized ones."""
    dtype: str
    """Type of the gathered parameter, and of its gradient. For a layer's matrices that are not quantized it is
    `gather_dtype`, so that no second copy is saved."""
    keep_for_backward: bool = False
    """Whether it is gathered once for both passes."""
    narrow_shards: tuple[Any, ...] = ()
    """The shard in `gather_dtype`, where it is stored in it, or cast once per step; one array per part."""
    split_dim: int | None = None
    """Dimension whose elements are gathered, and their gradients reduced, one by one: a product of each reads one."""

    @property
    def is_quantized(self) -> bool:
        """Whether it is gathered in 8 bits, from `narrow_shards`."""
        return self.gather_dtype.startswith("float8")

    @property
    def gather_input(self) -> Any:
        """The shard that is gathered, if it is gathered in one part."""
        return self.narrow_shards[0] if self.narrow_shards and self.split_dim is None else self.shard

    def materialized(self) -> Any:
        """See `WrappedParam.materialized`; it is all-gathered."""
        if non_manual_axes().issuperset(self.reduction.shard_axes):
            # Outside the manual region, where nothing is differentiated: the partitioner inserts the all-gather.
            return reshard(self.gather_input.astype(self.gather_dtype), spec(*self.names)).astype(self.dtype)
        return self.with_gathered(gather(self)).materialized() if self.is_quantized else gather(self)

    def in_full(self, full: Array) -> Any:
        """Returns the parameter of this gathered array."""
        if not self.is_quantized:
            return full
        from mtjax.sharding.float8 import QuantizedWeight

        return QuantizedWeight(full, self.dtype)

    def with_gathered(self, full: Array) -> ReplicatedParam:
        """Returns the same parameter once it has been gathered, as `full`, for both passes."""
        # `shard` stays what the loss is differentiated by: the gradient of `full` is reduced to its shape.
        return ReplicatedParam(self.in_full(full), self.shard, spec(*self.names), self.reduction)


def is_wrapped(x: Any) -> bool:
    """Returns whether `x` is a wrapped parameter, which `materialize` unwraps."""
    return isinstance(x, WrappedParam)


def communicating_param(leaf: Any) -> "ShardedParam | ReplicatedParam | None":
    """Returns the wrapper of a parameter that is gathered or whose gradient is reduced over ranks; else None."""
    return leaf.communicating if is_wrapped(leaf) else None


def materialize(module: T) -> T:
    """Replaces every wrapped parameter of a module, or of any tree, by what products use."""
    return jax.tree.map(lambda leaf: leaf.materialized() if is_wrapped(leaf) else leaf, module, is_leaf=is_wrapped)


def gather(leaf: ShardedParam) -> Array:
    """All-gathers a parameter where it is used, in the manual region."""
    # The float32 shard is an argument even if `narrow_shards` are sent, so that it gets the gradient. A quantized
    # parameter gets its gradient by `with_gathered`, and is not differentiated here.
    shard = leaf.gather_input if leaf.is_quantized else leaf.shard
    return _gather(replace(leaf, shard=None, narrow_shards=()), shard, leaf.narrow_shards)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reduce_grad(param_spec: PartitionSpec, reduction: GradReduction, array: Array, shard: Array) -> Array:
    """Returns `array`, which is sharded as `param_spec`. Its gradient, reduced over ranks, becomes that of `shard`:
    float32 zeros in the shape of the reduced gradient."""
    return array


def _reduce_grad_forward(
    param_spec: PartitionSpec, reduction: GradReduction, array: Array, shard: Array
) -> tuple[Array, None]:
    return array, None


def _reduce_grad_backward(
    param_spec: PartitionSpec, reduction: GradReduction, _: None, gradient: Array
) -> tuple[None, Array]:
    return None, reduce_gradient(gradient, param_spec, reduction)


_reduce_grad.defvjp(_reduce_grad_forward, _reduce_grad_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(leaf: ShardedParam, shard: Array, narrow_shards: tuple[Array, ...]) -> Array:
    """All-gathers a shard along `reduction.dim`; backward, reduce-scatters the gradient along the same dimension.

    Args:
      leaf: the parameter, without arrays.
      shard: float32, 1 / `reduction.num_shards` of the parameter.
      narrow_shards: the same in `gather_dtype`, if it exists already, in parts.
    """
    dtype = leaf.gather_dtype if leaf.is_quantized else leaf.dtype
    with jax.named_scope("parameters"):
        gather_one = map_shards(lambda a: all_gather_manual(leaf, a).astype(dtype), spec(*leaf.names))
        full = [gather_one(a) for a in narrow_shards or (shard,)]
        # XLA: a product that reads one part of the concatenation reads that part's own array.
        return full[0] if leaf.split_dim is None else jnp.concatenate(full, axis=leaf.split_dim)


def _gather_forward(leaf: ShardedParam, shard: Array, narrow_shards: tuple[Array, ...]) -> tuple[Array, int]:
    # Neither the shard nor the gathered parameter is a residual: only how many gradients are None.
    return _gather(leaf, shard, narrow_shards), len(narrow_shards)


def _gather_backward(leaf: ShardedParam, num_narrow: int, gradient: Array) -> tuple[Array, tuple[None, ...]]:
    """Reduce-scatters the gradient [...] of the full parameter: float32, in the shape of the shard."""
    reduced = partial(reduce_gradient, grad_spec=spec(*leaf.names), reduction=leaf.reduction)
    none = (None,) * num_narrow
    if leaf.split_dim is None:
        return reduced(gradient), none
    parts = jnp.split(gradient, gradient.shape[leaf.split_dim], axis=leaf.split_dim)
    return jnp.concatenate([reduced(part) for part in parts], axis=leaf.split_dim), none


_gather.defvjp(_gather_forward, _gather_backward)


def all_gather_manual(parameter: ShardedParam, shard: Array) -> Array:
    """All-gathers a shard in `gather_dtype`, with all axes manual."""
    # XLA: the operand's layout, sharded dimension outermost, would spread to the stack: a transposed copy of all of it.
    sent = row_major(shard).astype(parameter.gather_dtype)
    return lax.all_gather(sent, parameter.reduction.shard_axes, axis=parameter.reduction.dim, tiled=True)


def row_major(a: Array) -> Array:
    """Returns an array in row-major memory layout; every mesh axis is manual."""
    return with_layout_constraint(a, MemoryLayout(major_to_minor=tuple(range(a.ndim))))


# --- reduction over ranks, and the arrays by which a loss is differentiated


def reduce_gradient(gradient: Array, grad_spec: PartitionSpec, reduction: GradReduction) -> Array:
    """Reduces a gradient over ranks: a reduce-scatter where `reduction` has a dimension, else an all-reduce.

    In bfloat16, each rank's gradient is rounded before it is sent, and every partial sum is rounded too.

    Args:
      gradient: local to the rank's samples; sharded as `grad_spec`, and otherwise in full.
      grad_spec: its sharding; along manual axes each rank has its shard already.
      reduction: axes, dimension and communication dtype.

    Returns:
      The sum, float32: this rank's shard of it along `reduction.dim`.
    """
    if not reduction.axes:
        return gradient.astype(jnp.float32)
    all_reduced = tuple(axis for axis in reduction.axes if axis not in reduction.shard_axes)

    def local(g: Array) -> Array:
        """Reduces with all axes manual: [shard of the gradient] -> [shard of the sum]."""
        g = g.astype(reduction.comm_dtype)
        if reduction.dim == NOT_SHARDED or reduction.comm_dtype != "float32":
            # XLA: with sequence parallelism a norm's gradient has just been reduced over `model`; the barrier prevents
            # merging both all-reduces into one. On CPUs it adds bfloat16 in float32, and would skip the rounding.
            g = lax.optimization_barrier(g)
        if reduction.dim != NOT_SHARDED:
            g = lax.psum_scatter(g, reduction.shard_axes, scatter_dimension=reduction.dim, tiled=True)
        return (lax.pmax if reduction.is_maximum else psum_varying)(g, all_reduced).astype(jnp.float32)

    with jax.named_scope("gradients"):
        return map_shards(local, explicit_only(grad_spec))(gradient.astype(jnp.float32))


def differentiable_shards(wrapped: Tree) -> Tree:
    """Returns the arrays to differentiate by: shards of wrapped parameters, plain parameters, None for frozen ones."""
    return jax.tree.map(lambda leaf: leaf.shard if is_wrapped(leaf) else leaf, wrapped, is_leaf=is_wrapped)


def with_shards(wrapped: Tree, shards: Tree) -> Tree:
    """Replaces the arrays that `differentiable_shards` returns; frozen parameters stay as they are."""

    def one(leaf: Any, shard: Any) -> Any:
        return leaf.with_shard(shard) if is_wrapped(leaf) else shard

    return jax.tree.map(one, wrapped, shards, is_leaf=is_wrapped)


class LayerInputs(NamedTuple):
    """What a loop passes to a layer besides hidden states; of several layers, each array stacked."""

    parameters: Any
    number: Array
    """Number of the layer in the model, int32 []."""
    state: Any = None
    """What the layer reads and returns besides hidden states, such as a KV cache."""


def index_layer(stacks: T, index: Any) -> T:
    """Takes one layer out of stacks: [layers, ...] -> [...]; `index` must not be negative."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, False, allow_negative_indices=False), stacks)
