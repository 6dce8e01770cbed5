"""Sends stage-boundary activations and their gradients between pipeline stages, by collective-permutes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard

from mtjax.layout.rules import MODEL, STAGE
from mtjax.sharding.axes import dimension_axes, map_ranks, map_shards, non_manual_axes, with_axes
from mtjax.sharding.rank_values import psum_shards

Tree = Any


def packed(boundary: Tree) -> Tree:
    """Shards activations [batch, seq, embed] for sending: the scatter/gather optimization of arXiv 2104.04473, 4.1.

    An array that is replicated over `model` is sharded along its sequence, so that each rank sends its shard alone;
    `unpacked` gathers it.
    """
    with jax.named_scope("stages"):
        return jax.tree.map(lambda x: reshard(x, _packed_spec(x, jax.typeof(x).sharding.spec)), boundary)


def send(boundary: Tree, by: int, *, wraps: bool) -> Tree:
    """Sends arrays to the stage `by` after this one, by a collective-permute each, and returns the received ones.

    Args:
      boundary: `packed` arrays; the received ones are packed too.
      by: 1 for activations, -1 for gradients.
      wraps: whether the last stage sends to the first, and the first to the last; if not, they receive zeros.
    """
    # With several chunks per stage, the last stage's boundary is the input of the first stage's next chunk.
    stages = lax.axis_size(STAGE)
    pairs = [(i, (i + by) % stages) for i in range(stages) if wraps or 0 <= i + by < stages]

    def one(x: Array) -> Array:
        return map_shards(lambda shard: lax.ppermute(shard, STAGE, pairs), jax.typeof(x).sharding.spec)(x)

    with jax.named_scope("stages"):
        return jax.tree.map(one, boundary)


def unpacked(boundary: Tree, like: Tree) -> Tree:
    """Gathers `packed` arrays for layers: resharded as `like`."""
    with jax.named_scope("stages"):
        # XLA: on CPUs, without the barrier, the gather of the zeros that are received before the first send is removed.
        boundary = lax.optimization_barrier(boundary)
        return jax.tree.map(lambda x, like: reshard(x, jax.typeof(like).sharding.spec), boundary, like)


def ordering_token(tree: Tree) -> Array:
    """Returns an int32 0 that XLA cannot know before all arrays of a tree exist: its readers run after them."""

    def local(*shards: Array) -> Array:
        firsts = [shard.ravel()[0] for shard in shards]
        # Never true, also of NaN, but too difficult for constant folding.
        never = jnp.stack([(a != a) & (a == a) for a in firsts]).any().astype(jnp.int32)
        return lax.pmax(never, MODEL) if MODEL in jax.typeof(never).mat.varying else never

    arrays = jax.tree.leaves(tree)
    specs = tuple(jax.typeof(x).sharding.spec for x in arrays)
    with jax.named_scope("stages"):
        return map_ranks(local, specs, PartitionSpec())(*arrays)


def sum_from_owner(x: Array) -> Array:
    """Broadcasts the array of the one stage where it is not zero to all stages, by an all-reduce."""
    with jax.named_scope("stages"):
        return psum_shards(x, (STAGE,))


def _packed_spec(x: Array, spec: PartitionSpec) -> PartitionSpec:
    """Adds `model` to the sequence dimension of `spec`, if `x` is not sharded and its sequence is divisible."""
    if MODEL not in non_manual_axes() or any(dimension_axes(spec, dim) for dim in range(x.ndim)):
        return spec
    if x.shape[1] % jax.typeof(x).sharding.mesh.shape[MODEL]:
        return spec
    # Dimension 1 is the sequence: all arrays of a boundary are [batch, seq, embed].
    return with_axes(spec, 1, (MODEL,))
