"""Zig-zag sharding of samples over context parallel ranks, which balances causal attention.

At a context parallel degree of c a sample is divided into 2c chunks, and rank i has chunks i and 2c-1-i: an early one,
whose tokens attend to few tokens, and a late one, whose tokens attend to many (arXiv 2405.07719; Llama 3, arXiv
2407.21783).
"""

import math
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import context_axes, local_positions
from mtjax.sharding.rank_values import psum_shards


def rank_positions(rank: Any, degree: int, length: int, xp: ModuleType = jnp) -> Any:
    """Returns the positions of a rank's tokens in a sample of `length` tokens: int32 [length / degree].

    Args:
      rank: its index, which may be traced.
      degree: of context parallelism.
      length: a multiple of 2 * degree.
      xp: `jax.numpy` or `numpy`, whose array is returned.
    """
    # Chunk `rank`, then chunk 2 degree - 1 - rank.
    chunk = length // (2 * degree)
    offsets = xp.arange(chunk, dtype=np.int32)
    return xp.concatenate([offsets + rank * chunk, offsets + (2 * degree - 1 - rank) * chunk])


def token_order(degree: int, length: int) -> np.ndarray:
    """Returns the positions of a sample's tokens in the order of the ranks that have them, int32 [length]."""
    return np.concatenate([rank_positions(rank, degree, length, np) for rank in range(degree)])


def sum_over_context(x: Array) -> Array:
    """All-reduces values of samples over context parallel ranks; returns x where a rank has entire samples."""
    axes = context_axes()
    # XLA: for GPUs, it would merge an all-reduce over `model` into this one where nothing else reads its result.
    return psum_shards(lax.optimization_barrier(x), axes) if axes else x


def sample_length(length: int) -> int:
    """Returns the number of tokens of a sample of which this rank has `length`."""
    return length * math.prod(lax.axis_size(axis) for axis in context_axes())


def from_first_context_rank(values: Float[Array, " batch"], length: int) -> Float[Array, " batch"]:
    """Zeroes the values of samples on all context parallel ranks but the first, so that their sum is the value.

    Args:
      values: of each sample, equal on all these ranks.
      length: tokens of a sample that a rank has.
    """
    positions = local_positions(length)
    # The first rank is the one that has position 0; `lax.axis_index` would be hoisted out of the scan over layers.
    return values if positions is None else jnp.where(positions[0] == 0, values, 0)


def sum_of_preceding_chunks(counts: Int[Array, "2 samples experts"], axes: Axes) -> Int[Array, "2 samples experts"]:
    """Sums the counts of all chunks of a sample before each of this rank's two; an exclusive prefix sum over ranks.

    Args:
      counts: of the rank's early and late chunk.
      axes: mesh axes of context parallelism.
    """
    gathered, rank, degree = lax.all_gather(counts, axes), lax.axis_index(axes), lax.axis_size(axes)
    # [chunks, samples, experts]: early chunks of ranks 0, 1, ..., then late chunks of ranks ..., 1, 0.
    in_order = jnp.concatenate([gathered[:, 0], gathered[::-1, 1]])
    before = jnp.cumsum(in_order, 0) - in_order
    return jnp.stack([before[rank], before[2 * degree - 1 - rank]])
