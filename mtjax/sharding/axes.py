"""`spec`, which places an array by the logical names of its dimensions, and which axes an array varies over.

A model says `spec("batch", "act_seq", "embed")`; which mesh axes that means is decided by the `Rules` in force, set
once by `use_rules` around tracing. Mesh axes have the type `Explicit`: a sharding is part of an array's type, so
that a cotangent is placed like its primal and the backward pass needs no hints of its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, reshard

from mtjax.theory.rules import MANUAL, Axes, Rules

REPLICATED = PartitionSpec()
"""Not split: replicated on every device."""

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
    """Those of the innermost `use_rules`."""
    return _in_force.get()


def spec(*names: str | None) -> PartitionSpec:
    """Where an activation whose dimensions have these logical names lives, by the rules in force.

    Inside a `shard_map`, axes that are manual there are left out: its body sees only its own shard of them.

    Raises:
      LookupError: no rules are in force.
      AttributeError: a name is not a logical axis.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    rules = _in_force.get()
    return PartitionSpec(*(_entry(tuple(a for a in rules.axes(name) if a not in manual)) for name in names))


def partition_spec(rules: Rules, names: Sequence[str | None]) -> PartitionSpec:
    """Where an array whose dimensions have these names lives, outside of any `shard_map`."""
    return PartitionSpec(*(_entry(rules.axes(name)) for name in names))


def dimension_axes(place: PartitionSpec, dim: int) -> Axes:
    """The mesh axes that split a dimension of an array placed as `place`."""
    entry = place[dim] if dim < len(place) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def only_axes(place: PartitionSpec, axes: Axes) -> PartitionSpec:
    """`place` reduced to the mesh axes `axes`, as a `shard_map` over these needs it."""
    dims = range(len(place))
    return PartitionSpec(*(_entry(tuple(a for a in dimension_axes(place, i) if a in axes)) for i in dims))


def with_axes(place: PartitionSpec, dim: int, axes: Axes) -> PartitionSpec:
    """`place` with dimension `dim`, which it leaves unsplit, split over `axes`."""
    entries = list(place)
    entries[dim] = _entry(axes)
    return PartitionSpec(*entries)


def _entry(axes: Axes) -> str | Axes | None:
    """An entry of a `PartitionSpec`. A lone axis is not wrapped in a tuple: to jax ("data",) differs from "data"."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


def num_shards(name: str) -> int:
    """The number of parts into which the mesh in force splits a dimension of this name, by the rules in force."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes.get(axis, 1) for axis in _in_force.get().axes(name))


def sequence_is_sharded() -> bool:
    """Whether the rules in force split the sequences of the residual stream more than those that mixers read."""
    return spec("act_seq") != spec("seq")


def explicit_axes() -> frozenset[str]:
    """Mesh axes that are not manual here: those that a nested `shard_map` makes manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def explicit_only(place: PartitionSpec) -> PartitionSpec:
    """`place` without the axes that are manual here, along which each rank sees only its own part."""
    return only_axes(place, tuple(explicit_axes()))


def fully_manual(body: Callable[[jax.Array], jax.Array], place: PartitionSpec) -> Callable[[jax.Array], jax.Array]:
    """A nested map in which every axis is manual: collectives don't lower while any axis is explicit."""
    return jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=(place,), out_specs=place)


def varying_like(x: jax.Array, *like: jax.Array) -> jax.Array:
    """`x` typed as varying over every manual axis that some `like` varies over.

    A constant is the same on all ranks, and a scan refuses to carry it into something that is not.
    """
    axes = frozenset[str]().union(*(_varying(a) for a in like)) - _varying(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def psum_varying(x: jax.Array, axes: Axes = MANUAL) -> jax.Array:
    """The sum of `x` over those of `axes` over which it varies; `x` itself where it is the same on all ranks."""
    varying = tuple(axis for axis in varying_axes(x) if axis in axes)
    return lax.psum(x, varying) if varying else x


def psum_shards(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of `x`, of which each device may hold a part, over manual axes."""
    return fully_manual(lambda part: lax.psum(part, axes), jax.typeof(x).sharding.spec)(x)


def merge(x: jax.Array, start: int, stop: int) -> jax.Array | None:
    """`x` with dimensions `start` to `stop` merged; None if any but the first of them is split over several ranks."""
    sharding = jax.typeof(x).sharding
    ways = [math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, i)) for i in range(x.ndim)]
    if any(n > 1 for n in ways[start + 1 : stop]):
        return None
    place = PartitionSpec(*sharding.spec[: start + 1], *sharding.spec[stop:])
    return x.reshape(*x.shape[:start], -1, *x.shape[stop:], out_sharding=place)


def shard_like_rows(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """A vector, split as the first dimension of `like` is."""
    return reshard(x, PartitionSpec(jax.typeof(like).sharding.spec[0]))


def cond_by_stage(holds: jax.Array, then: Callable[..., Any], otherwise: Callable[..., Any], *arguments: Any) -> Any:
    """Branches of which a stage takes one: all ranks of a stage the same."""
    with jax.named_scope("stages"):
        return lax.cond(holds, then, otherwise, *arguments)


def broadcast_from_rank0(x: jax.Array, besides: Axes) -> jax.Array:
    """`x`, which is the same on all ranks but is not known to be, as the first has it; it may vary over `besides`."""
    axes = tuple(axis for axis in varying_axes(x) if axis not in besides)
    if not axes:
        return x
    is_first = sum(lax.axis_index(axis) for axis in axes) == 0
    return psum_shards(jnp.where(is_first, x, 0), axes)


def varying_axes(x: jax.Array) -> tuple[str, ...]:
    """The manual axes over which `x` varies: ranks along them may have different values."""
    return tuple(axis for axis in MANUAL if axis in _varying(x))


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).mat.varying)
