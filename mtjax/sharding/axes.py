"""Logical axis names, the table that maps them to mesh axes, and `spec`, which models use to place an array.

A model says `spec("batch", "act_seq", "embed")`; which mesh axes that means is decided by the `Rules` in force, set
once by `use_rules` around tracing. Mesh axes have the type `Explicit`: a sharding is part of an array's type, so
that a cotangent is placed like its primal and the backward pass needs no hints of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

import jax
from jax import lax
from jax.sharding import PartitionSpec, reshard

from mtjax.errors import nearest

MODEL = "model"
DATA = "data"
WHOLE = PartitionSpec()
"""Not split: every device has all of it."""


@dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axis that splits it; None is not split."""

    batch: str | None = None
    seq: str | None = None
    key_seq: str | None = None
    """The sequence that queries look at: of keys, in scores and masks."""
    act_seq: str | None = None
    """The sequence in the residual stream between blocks."""
    embed: str | None = None
    heads: str | None = None
    head_dim: str | None = None
    qkv: str | None = None
    """Query, key and value, stacked so that they are one product."""
    kv_heads: str | None = None
    """Key and value heads that groups of query heads share; whole on each rank where there are fewer than ranks."""
    kv: str | None = None
    """Key and value, stacked."""
    mlp: str | None = None
    gate: str | None = None
    """Gate and up projection of a gated MLP, stacked so that they are one product."""
    vocab: str | None = None
    layers: str | None = None
    features: str | None = None
    """Width of a projection that every rank has whole: BERT's heads."""
    token_types: str | None = None
    buckets: str | None = None
    """Kinds of distance of relative positions."""
    classes: str | None = None
    """Answers of a classifier."""

    def mesh_axis(self, name: str | None) -> str | None:
        """The mesh axis of a logical name; None, a dimension without a name, is not split.

        Raises:
          AttributeError: no logical axis has this name.
        """
        if name is None:
            return None
        if name not in _NAMES:
            raise AttributeError(f"no logical axis is called {name!r}{nearest(name, _NAMES)}")
        return getattr(self, name)

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """Where an array whose dimensions have these names lives."""
        return PartitionSpec(*(self.mesh_axis(name) for name in names))


_NAMES = tuple(f.name for f in fields(Rules))
_in_force: ContextVar[Rules] = ContextVar("rules in force")


@contextmanager
def use_rules(rules: Rules) -> Iterator[None]:
    """Puts `rules` in force for `spec` while a program is traced."""
    token = _in_force.set(rules)
    try:
        yield
    finally:
        _in_force.reset(token)


def spec(*names: str | None) -> PartitionSpec:
    """Where an activation whose dimensions have these logical names lives, by the rules in force.

    Inside a `shard_map`, axes that are manual there are left out: its body sees only its own shard of them.

    Raises:
      LookupError: no rules are in force.
      AttributeError: a name is no logical axis.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    full = _in_force.get().spec(names)
    return PartitionSpec(*(None if axis in manual else axis for axis in full))


def explicit_axes() -> frozenset[str]:
    """Mesh axes that are not manual here: those a nested `shard_map` takes over."""
    mesh = jax.sharding.get_abstract_mesh()
    return frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)


def varying_like(x: jax.Array, *like: jax.Array) -> jax.Array:
    """`x` typed as varying over every manual axis that some `like` varies over.

    A constant is the same on all ranks, and a scan refuses to carry it into something that is not.
    """
    axes = frozenset[str]().union(*(_varying(a) for a in like)) - _varying(x)
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def sum_ranks(x: jax.Array) -> jax.Array:
    """The sum of the data ranks' values; `x` itself where it is the same on all of them."""
    return lax.psum(x, DATA) if DATA in _varying(x) else x


def merge(x: jax.Array, start: int, stop: int) -> jax.Array | None:
    """Dimensions `start` to `stop` of `x` as one; None where any but the very first of them is split over several."""
    sharding = jax.typeof(x).sharding
    axes = sharding.spec
    if any(axis is not None and sharding.mesh.shape[axis] > 1 for axis in axes[start + 1 : stop]):
        return None
    place = PartitionSpec(*axes[: start + 1], *axes[stop:])
    return x.reshape(*x.shape[:start], -1, *x.shape[stop:], out_sharding=place)


def split_like_rows(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
    """A vector, split as the first dimension of `like` is."""
    return reshard(x, PartitionSpec(jax.typeof(like).sharding.spec[0]))


def _varying(x: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(x).mat.varying)
