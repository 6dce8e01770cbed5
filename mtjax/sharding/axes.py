"""Shards arrays by the logical names of their dimensions, and handles the axes over which they vary.

A model writes `spec("batch", "act_seq", "embed")`; the `Rules` in force, set once by `use_rules` around tracing, map
these logical axes to mesh axes. Mesh axes have the type `Explicit`: a sharding is part of an array's type, so that a
cotangent is sharded like its primal, and the backward pass needs no sharding constraints.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as PartitionSpec  # for models, which import none from jax
from jax.sharding import reshard
from jaxtyping import Bool, Float, Int

from mtjax.layout.rules import MANUAL, Axes, Rules

REPLICATED = PartitionSpec()
"""Replicated on every device."""

# A variable, not an argument, which every module of a model would have to pass on; read while tracing alone.
_in_force: ContextVar[Rules] = ContextVar("rules in force")


@contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Puts `rules` in force for `spec` while a program is traced."""
    token = _in_force.set(rules)
    try:
        yield
    finally:
        _in_force.reset(token)


def current_rules() -> Rules:
    """Returns the rules of the innermost `use_rules`."""
    return _in_force.get()


def spec(*names: str | None) -> PartitionSpec:
    """Returns the sharding of an activation whose dimensions have these logical names, by the rules in force.

    Inside a `shard_map`, its manual axes are omitted: the body sees only the local shard along them.

    Raises:
      LookupError: no rules are in force.
      AttributeError: a name is not a logical axis.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    rules = current_rules()
    # A logical axis may map to several mesh axes, such as batch -> (data, expert).
    return PartitionSpec(*(_entry(tuple(a for a in rules.mesh_axes(name) if a not in manual)) for name in names))


def partition_spec(rules: Rules, names: Sequence[str | None]) -> PartitionSpec:
    """Returns the sharding of an array whose dimensions have these names, outside of any `shard_map`."""
    return PartitionSpec(*(_entry(rules.mesh_axes(name)) for name in names))


def dimension_axes(partition: PartitionSpec, dim: int) -> Axes:
    """Returns the mesh axes over which `partition` shards a dimension; () where it does not."""
    entry = partition[dim] if dim < len(partition) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def only_axes(partition: PartitionSpec, axes: Axes) -> PartitionSpec:
    """Restricts `partition` to the mesh axes `axes`, as a `shard_map` over these needs it."""
    dims = range(len(partition))
    return PartitionSpec(*(_entry(tuple(a for a in dimension_axes(partition, i) if a in axes)) for i in dims))


def with_axes(partition: PartitionSpec, dim: int, axes: Axes) -> PartitionSpec:
    """Shards dimension `dim` of `partition`, which was not sharded, over `axes`."""
    entries = list(partition)
    entries[dim] = _entry(axes)
    return PartitionSpec(*entries)


def _entry(axes: Axes) -> str | Axes | None:
    """Builds an entry of a `PartitionSpec`."""
    # A single axis is not wrapped in a tuple: to jax ("data",) differs from "data".
    return None if not axes else axes[0] if len(axes) == 1 else axes


def num_shards(name: str) -> int:
    """Returns the number of shards of a dimension of this name, by the rules and the mesh in force."""
    sizes = jax.sharding.get_abstract_mesh().shape
    # A mesh has only the axes that a run uses: a missing one has degree 1.
    return math.prod(sizes.get(axis, 1) for axis in current_rules().mesh_axes(name))


def sequence_is_sharded() -> bool:
    """Returns whether sequence parallelism shards the hidden states between layers more than inside mixers."""
    return spec("act_seq") != spec("seq")


def width_is_sharded() -> bool:
    """Returns whether 2D tensor parallelism shards the width of hidden states between layers."""
    return bool(current_rules().act_embed)


def non_manual_axes() -> frozenset[str]:
    """Returns the mesh axes that are not manual here: those that a nested `shard_map` can make manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def explicit_only(partition: PartitionSpec) -> PartitionSpec:
    """Removes from `partition` the axes that are manual here, along which each rank sees only its shard."""
    return only_axes(partition, tuple(non_manual_axes()))


def map_ranks(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Maps `body` over the shards of its arguments, with all axes manual that are still explicit."""
    # Autodiff of a `shard_map` inside the manual region does not lower: call this inside the forward or the backward
    # function of a `custom_vjp`, or where nothing is differentiated.
    return jax.shard_map(body, axis_names=set(non_manual_axes()), in_specs=in_specs, out_specs=out_specs)


def map_shards(body: Callable[[jax.Array], jax.Array], partition: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """Maps `body` over the shards of an array and of a result with the same sharding, with every mesh axis manual.

    Collectives such as `lax.all_gather` do not lower while any axis is explicit.
    """
    return map_ranks(body, (partition,), partition)


def varying_like(x: jax.Array, *like: jax.Array) -> jax.Array:
    """Marks `x` as varying over every manual axis over which some `like` varies.

    A constant has the type of a value that is equal on all ranks, and `lax.scan` requires equal types of its carry.
    """
    axes = frozenset[str]().union(*(_varying(a) for a in like)) - _varying(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def psum_varying(x: jax.Array, axes: Axes = MANUAL) -> jax.Array:
    """All-reduces `x` over those of `axes` over which it varies; returns `x` where it is equal on all ranks."""
    varying = tuple(axis for axis in varying_axes(x) if axis in axes)
    return lax.psum(x, varying) if varying else x


def min_and_sum_over_shards(
    function: Callable[[Any], tuple[jax.Array, Sequence[jax.Array]]], arrays: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the minimum over devices of a scalar of their shards, and the sum over all elements of another.

    `function(shards)` returns the scalar of which the minimum is taken, and a list of sums over one array's shard each,
    which are added up; that of a replicated array counts once. Only scalars are sent.
    """

    def reduced(shards: Any) -> tuple[jax.Array, jax.Array]:
        """Reduces the results of this rank's shards to scalars that are equal on all ranks."""
        least, terms = function(shards)
        by_axes: dict[Axes, list[jax.Array]] = {}
        for term in terms:
            by_axes.setdefault(tuple(sorted(_varying(term))), []).append(term)
        # Along other axes the shards are replicas, so that the values are equal already.
        total = sum((lax.psum(sum(each), axes) if axes else sum(each)) for axes, each in sorted(by_axes.items()))
        axes = tuple(sorted(_varying(least)))
        return lax.pmin(least, axes) if axes else least, jnp.asarray(total)

    specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    return jax.shard_map(reduced, in_specs=(specs,), out_specs=(REPLICATED, REPLICATED))(arrays)


def merge(x: jax.Array, start: int, stop: int) -> jax.Array | None:
    """Merges dimensions `start` to `stop` (exclusive) of `x`; returns None if any but the first of them is sharded."""
    sharding = jax.typeof(x).sharding
    degrees = [math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, i)) for i in range(x.ndim)]
    # Row-major, the elements of a rank would not be consecutive: merging them would move data between ranks.
    if any(n > 1 for n in degrees[start + 1 : stop]):
        return None
    partition = PartitionSpec(*sharding.spec[: start + 1], *sharding.spec[stop:])
    return x.reshape(*x.shape[:start], -1, *x.shape[stop:], out_sharding=partition)


def merge_both(dims: str, left: tuple[Array, int], right: tuple[Array, int]) -> tuple[str, Array, Array]:
    """Merges the dimensions `dims`, einsum letters, which each of two arrays has from the given position on, into one.

    Returns the letter of the merged dimension, and the arrays; all unchanged if an array is sharded along any but the
    first of these dimensions.
    """
    first, second = (merge(a, start, start + len(dims)) for a, start in (left, right))
    if first is None or second is None:
        return dims, left[0], right[0]
    return dims[0], first, second


def shard_like_rows(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """Shards a vector like the first dimension of `like`."""
    return reshard(x, PartitionSpec(jax.typeof(like).sharding.spec[0]))


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """Returns the manual axes over which `x` varies: ranks along them may have different values."""
    return tuple(axis for axis in MANUAL if axis in _varying(x))


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).mat.varying)


def context_axes() -> Axes:
    """Returns the manual mesh axes of context parallelism; () where a rank has all tokens of its samples."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in current_rules().seq if axis in manual)


def local_positions(length: int) -> Int[Array, " seq"] | None:
    """Returns the positions of this rank's `length` tokens in their sample; None where a rank has entire samples.

    Call it outside of scans over layers: `lax.scan` would hoist the rank's index out of them, and of the manual region.
    """
    axes = context_axes()
    if not axes:
        return None
    from mtjax.sharding.context.zigzag import rank_positions

    return rank_positions(lax.axis_index(axes), lax.axis_size(axes), length * lax.axis_size(axes))


@dataclass(frozen=True, eq=False)
class _Opaque:
    """A traced function as a primitive's parameter."""

    # jax 0.12 requires more rules of a primitive that has the jaxpr itself as its parameter.
    jaxpr: Any


_opaque_p = Primitive("opaque")
_opaque_p.multiple_results = True
_opaque_p.def_abstract_eval(lambda *_, traced: traced.jaxpr.out_avals)
_opaque_p.def_impl(lambda *arrays, traced: jaxpr_as_fun(traced.jaxpr)(*arrays))
mlir.register_lowering(
    _opaque_p, mlir.lower_fun(lambda *arrays, traced: jaxpr_as_fun(traced.jaxpr)(*arrays), multiple_results=True)
)


def no_hoist(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(*arguments)` as one primitive, opaque until it is lowered, so that `lax.scan` hoists nothing out
    of it. The primitive has no derivative: differentiate around it, as `where` does."""
    # `lax.scan` hoists what is computed from constants alone, such as a mask broadcast to the shape of attention
    # scores: the program would materialize that array, keep it alive through the step, and read it in every layer. It
    # hoists constants even out of a nested `shard_map`, which then does not lower.
    arrays, tree = jax.tree.flatten(arguments)
    flat = lambda *arrays: function(*jax.tree.unflatten(tree, arrays))  # noqa: E731
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), _opaque_p.bind(*arrays, traced=_Opaque(jaxpr)))


def where(keep: Bool[Array, "..."], x: Float[Array, "..."], otherwise: float) -> Float[Array, "..."]:
    """`jnp.where`, but the mask, which may have dimensions of 1, is not hoisted out of a scan in the shape of `x`."""
    return cast(Array, _where(keep, x, otherwise))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _where(keep: Array, x: Array, otherwise: float) -> Array:
    return no_hoist(lambda keep, x: jnp.where(keep, x, otherwise), keep, x)


def _where_forward(keep: Array, x: Array, otherwise: float) -> tuple[Array, Array]:
    return where(keep, x, otherwise), keep


def _where_backward(_: float, keep: Array, gradient: Array) -> tuple[None, Array]:
    """Selects the gradient, in the shape of x, where `keep`."""
    return None, where(keep, gradient, 0.0)


_where.defvjp(_where_forward, _where_backward)
