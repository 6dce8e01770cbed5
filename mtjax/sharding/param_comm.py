"""Parameters on their way into a product: gathered just before it, their gradients reduced as soon as they exist.

Models call `materialize` where they use a layer's parameters. Mostly that does nothing. But a parameter whose gradient
is reduced in the backward pass, or that is gathered for each use, comes as a `Reduced` or `Gathered`
(`mtjax.sharding.reduction` says which), and `materialize` is where that happens.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from mtjax.sharding.axes import explicit_axes, explicit_only, fully_manual, psum_varying, spec, varying_like
from mtjax.theory.layout import NOT_SHARDED
from mtjax.theory.rules import Axes

Tree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class GradReduction:
    """How a gradient is summed over the ranks that hold the same parameter and see other samples."""

    axes: Axes
    """Mesh axes over which it is summed; each has more than one way."""
    dim: int
    """Dimension of which each rank keeps its own part of the sum, or `UNSPLIT`: each keeps all of it."""
    shard_axes: Axes
    """Those of `axes` that split this dimension; () when `UNSPLIT`."""
    num_shards: int
    """In how many parts they split it."""
    comm_dtype: str = "float32"
    """Type in which it travels, and in which it is added to other ranks'."""


@partial(jax.tree_util.register_dataclass, data_fields=["array", "shard"], meta_fields=["spec", "reduction"])
@dataclass(frozen=True)
class ReduceGradOnUse:
    """A replicated parameter whose gradient is summed over ranks at once, and arrives at `part`.

    A parameter in the compute type may be summed over no axes: then its gradient is widened, and that is all.
    """

    array: Any
    """Or the `Gathered` from which it is made once a step."""
    shard: Any
    """float32 zeros, to differentiate by."""
    spec: PartitionSpec
    """Of the parameter where it is used, without the leading `layers`; likewise `total`."""
    reduction: GradReduction


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["shard"],
    meta_fields=["names", "reduction", "gather_dtype", "dtype", "keep_for_backward"],
)
@dataclass(frozen=True)
class GatherOnUse:
    """A rank's part of a parameter that is gathered for each use, and its gradient scattered."""

    shard: Any
    names: tuple[str, ...]
    """Of the dimensions where it is used, without the leading `layers`; likewise `total`."""
    reduction: GradReduction
    gather_dtype: str
    """Type in which it is gathered: the compute type for matrices."""
    dtype: str
    """Type in which the model gets it, and its gradient. A layer's matrices stay as they were sent, so that no copy is
    kept."""
    keep_for_backward: bool = False
    """Whether it is gathered once for both passes."""

    def with_gathered(self, whole: Array) -> ReduceGradOnUse:
        """The same parameter once it is gathered, for both passes."""
        return ReduceGradOnUse(whole, self.shard, spec(*self.names), self.reduction)


@partial(jax.tree_util.register_dataclass, data_fields=["parameter"], meta_fields=[])
@dataclass(frozen=True)
class NoGrad:
    """A parameter of a stack that has no gradient."""

    parameter: Any
    """An array, or a `Gathered`."""


@partial(jax.tree_util.register_dataclass, data_fields=["parameter", "accumulator"], meta_fields=[])
@dataclass(frozen=True)
class AccumulateInto:
    """A stack's parameter whose gradient comes out as `total`, the sum of earlier microbatches', with its own added."""

    parameter: Any
    """An array, or one of the above."""
    accumulator: Any


def is_wrapped(x: Any) -> bool:
    """Whether `x` stands for a parameter that `materialize` must resolve."""
    return isinstance(x, ReduceGradOnUse | GatherOnUse | NoGrad)


def materialize(module: T) -> T:
    """`module`, or any tree of parameters, with every wrapped parameter replaced by an array that products can use."""
    return jax.tree.map(_resolve, module, is_leaf=is_wrapped)


def _resolve(leaf: Any) -> Any:
    match leaf:
        case NoGrad(parameter):
            return _resolve(parameter)
        case ReduceGradOnUse(array, part, place, total):
            return _attach(place, total, array, part)
        case GatherOnUse(part, names, total, sent, dtype, _) if explicit_axes().issuperset(total.shard_axes):
            return reshard(part.astype(sent), spec(*names)).astype(dtype)
        case GatherOnUse(part, names, total, sent, dtype, _):
            return _gather(spec(*names), total, sent, dtype, part)
    return leaf


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attach(place: PartitionSpec, total: GradReduction, array: Array, part: Array) -> Array:
    return array


def _attach_forward(place: PartitionSpec, total: GradReduction, array: Array, part: Array) -> tuple[Array, None]:
    return array, None


def _attach_backward(place: PartitionSpec, total: GradReduction, _: None, gradient: Array) -> tuple[None, Array]:
    return None, reduce_gradient(gradient, place, total)


_attach.defvjp(_attach_forward, _attach_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather(place: PartitionSpec, total: GradReduction, sent: str, dtype: str, part: Array) -> Array:
    def local(a: Array) -> Array:
        return lax.all_gather(a.astype(sent), total.shard_axes, axis=total.dim, tiled=True).astype(dtype)

    with jax.named_scope("parameters"):
        return fully_manual(local, place)(part)


def _gather_forward(
    place: PartitionSpec, total: GradReduction, sent: str, dtype: str, part: Array
) -> tuple[Array, None]:
    return _gather(place, total, sent, dtype, part), None


def _gather_backward(
    place: PartitionSpec, total: GradReduction, sent: str, dtype: str, _: None, gradient: Array
) -> tuple[Array]:
    return (reduce_gradient(gradient, place, total),)


_gather.defvjp(_gather_forward, _gather_backward)


# --- gradients that are added up, iteration by iteration of a loop over layers


def split_accumulators(layers: T) -> tuple[T, list[Array] | None]:
    """Parameters of a stack, and the sums that their gradients are to be added to; None where there are none."""
    is_leaf = lambda x: isinstance(x, AccumulateInto)  # noqa: E731
    sums = [leaf.accumulator for leaf in jax.tree.leaves(layers, is_leaf=is_leaf) if is_leaf(leaf)]
    plain = jax.tree.map(lambda leaf: leaf.parameter if is_leaf(leaf) else leaf, layers, is_leaf=is_leaf)
    return plain, sums or None


def accumulate_grads_into(layer: T, stack: list[Array], place: Array) -> tuple[T, list[Array]]:
    """Both unchanged; but the gradients of `layer` are added to the cotangents of `stack` at `place`, and end there.

    Args:
      layer: parameters of one layer.
      stack: the `differentiable` ones of all layers, in the same order.
      place: the layer's number.
    """
    parts, tree = jax.tree.flatten(differentiable_shards(layer))
    parts, stack = _tie(parts, stack, place)
    return with_shards(layer, jax.tree.unflatten(tree, parts)), stack


@jax.custom_vjp
def _tie(parts: list[Array], stack: list[Array], place: Array) -> tuple[list[Array], list[Array]]:
    return parts, stack


def _tie_forward(parts: list[Array], stack: list[Array], place: Array) -> tuple[Any, Array]:
    return (parts, stack), place


def _tie_backward(place: Array, gradients: tuple[list[Array], list[Array]]) -> tuple[None, list[Array], None]:
    own, totals = gradients
    return None, [add_to_layer(total, gradient, place) for total, gradient in zip(totals, own, strict=True)], None


_tie.defvjp(_tie_forward, _tie_backward)


def index_layer(stacks: T, place: Any) -> T:
    """What stacks hold of a layer."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, place, keepdims=False), stacks)


def add_to_layer(total: Array, own: Array, place: Any) -> Array:
    """A stack with `own` added to what it holds of a layer."""
    return set_layer(total, index_layer(total, place) + own, place)


def set_layer(total: Array, own: Array, place: Any) -> Array:
    """A stack that holds `own` of a layer."""
    return lax.dynamic_update_index_in_dim(total, own, place, 0)


@jax.custom_vjp
def seed_cotangents(sums: Tree, x: Array, stack: Tree) -> Array:
    """`x`; the cotangents of `stack`, which nothing else may read, start from `sums`."""
    return x


def _starting_forward(sums: Tree, x: Array, stack: Tree) -> tuple[Array, Tree]:
    return x, sums


def _starting_backward(sums: Tree, gradient: Array) -> tuple[None, Array, Tree]:
    return None, gradient, sums


seed_cotangents.defvjp(_starting_forward, _starting_backward)


# --- sums over ranks, and what is differentiated


def reduce_gradient(gradient: Array, place: PartitionSpec, total: GradReduction) -> Array:
    """A rank's gradient summed over ranks, in float32; where a dimension is split, this rank's part of the sum.

    In bfloat16 each rank's is rounded before it is sent, and the sum wherever it meets another rank's.

    Args:
      gradient: of the rank's own samples, unsplit but for `place`.
      place: how it is split; along manual axes each rank has its own part already.
      total: what is summed over which axes.
    """
    if not total.axes:
        return gradient.astype(jnp.float32)
    rest = tuple(axis for axis in total.axes if axis not in total.shard_axes)

    def local(g: Array) -> Array:
        g = g.astype(total.comm_dtype)
        if total.dim == NOT_SHARDED or total.comm_dtype != "float32":
            # With split sequences a norm's was summed over `model` before: XLA would merge both into one sum. On CPUs
            # it adds bfloat16 up in float32, and would not round before.
            g = lax.optimization_barrier(g)
        if total.dim != NOT_SHARDED:
            g = lax.psum_scatter(g, total.shard_axes, scatter_dimension=total.dim, tiled=True)
        return psum_varying(g, rest).astype(jnp.float32)

    with jax.named_scope("gradients"):
        return fully_manual(local, explicit_only(place))(gradient.astype(jnp.float32))


def differentiable_shards(wrapped: Tree) -> Tree:
    """The arrays of `wrapped` to differentiate by: parts of wrapped parameters, and parameters that are arrays; None of
    those that are frozen."""

    def one(leaf: Any) -> Any:
        match leaf:
            case NoGrad():
                return None
            case ReduceGradOnUse() | GatherOnUse():
                return leaf.shard
        return leaf

    return jax.tree.map(one, wrapped, is_leaf=is_wrapped)


def with_shards(wrapped: Tree, parts: Tree) -> Tree:
    """`wrapped` with other `differentiable` arrays."""

    def one(leaf: Any, part: Any) -> Any:
        match leaf:
            case NoGrad():
                return leaf
            case ReduceGradOnUse() | GatherOnUse():
                return replace(leaf, shard=part)
        return part

    return jax.tree.map(one, wrapped, parts, is_leaf=is_wrapped)


def zeros_like_shards(parts: Tree) -> Tree:
    """float32 accumulators."""
    return jax.tree.map(lambda p: varying_like(jnp.zeros_like(p, jnp.float32), p), parts)
