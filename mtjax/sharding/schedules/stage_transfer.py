"""What one stage of a pipeline sends to the next: one collective-permute over `stage` for each array."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from mtjax.sharding.axes import dimension_axes, explicit_axes, fully_manual, psum_shards, with_axes
from mtjax.theory.rules import MODEL, STAGE

Tree = Any


def packed(wire: Tree) -> Tree:
    """A wire of residual streams [batch, sequence, hidden] as it travels.

    An array that all model ranks have is split among them along its sequence, which `unpacked` undoes: section 4.1 of
    arXiv 2104.04473.
    """
    with jax.named_scope("stages"):
        return jax.tree.map(lambda x: reshard(x, _split(x, jax.typeof(x).sharding.spec)), wire)


def send(wire: Tree, by: int, *, wraps: bool) -> Tree:
    """A wire from the stage `by` places before: 1 sends forward, -1 backward.

    Args:
      wire: `packed`; what arrives is so too.
      by: 1 or -1.
      wraps: whether the last stage sends to the first, and the other way round; else they get zeros.
    """
    stages = lax.axis_size(STAGE)
    pairs = [(i, (i + by) % stages) for i in range(stages) if wraps or 0 <= i + by < stages]

    def one(x: Array) -> Array:
        return fully_manual(lambda part: lax.ppermute(part, STAGE, pairs), jax.typeof(x).sharding.spec)(x)

    with jax.named_scope("stages"):
        return jax.tree.map(one, wire)


def unpacked(wire: Tree, like: Tree) -> Tree:
    """A `packed` wire as layers read it: placed as `like`.

    Without the barrier XLA for CPUs drops the gather of the zeros that arrive before anything was sent.
    """
    with jax.named_scope("stages"):
        wire = lax.optimization_barrier(wire)
        return jax.tree.map(lambda x, like: reshard(x, jax.typeof(like).sharding.spec), wire, like)


def ordering_token(wire: Tree) -> Array:
    """0, an int32 that nobody knows before the arrays of a wire are there: what reads it comes behind them."""

    def local(*parts: Array) -> Array:
        firsts = [part.ravel()[0] for part in parts]
        never = jnp.stack([(a != a) & (a == a) for a in firsts]).any().astype(jnp.int32)
        return lax.pmax(never, MODEL) if MODEL in jax.typeof(never).mat.varying else never

    arrays = jax.tree.leaves(wire)
    places = tuple(jax.typeof(x).sharding.spec for x in arrays)
    with jax.named_scope("stages"):
        return jax.shard_map(local, axis_names=set(explicit_axes()), in_specs=places, out_specs=PartitionSpec())(
            *arrays
        )


def sum_from_owner(x: Array) -> Array:
    """The array of the one stage where it is not zero, on all of them."""
    with jax.named_scope("stages"):
        return psum_shards(x, (STAGE,))


def _split(x: Array, here: PartitionSpec) -> PartitionSpec:
    """`here`, and the sequence over `model` too if nothing is split over it and it divides."""
    if MODEL not in explicit_axes() or any(dimension_axes(here, dim) for dim in range(x.ndim)):
        return here
    if x.shape[1] % jax.typeof(x).sharding.mesh.shape[MODEL]:
        return here
    return with_axes(here, 1, (MODEL,))
