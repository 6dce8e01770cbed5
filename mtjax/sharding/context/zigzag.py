"""Where tokens stand: ranks of `context` share every sample, so that all have as much of causal attention to compute.

A sample is cut into twice as many chunks as there are ranks, c, and rank i has chunks i and 2c-1-i: an early one, whose
tokens see little, and a late one, whose tokens see much (zig-zag: arXiv 2405.07719, Llama 3's arXiv 2407.21783).
"""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.sharding.axes import current_rules, psum_shards
from mtjax.theory.rules import Axes


def rank_positions(rank: Any, ways: int, length: int, xp: ModuleType = jnp) -> Any:
    """Where a rank's tokens stand in a sample of `length` tokens: int32 [length / ways], of `xp`: jax's numpy or numpy.

    Args:
      rank: its number, which may be traced.
      ways: ranks that share the sample.
      length: a multiple of 2 * ways.
      xp: whose array it is.
    """
    chunk = length // (2 * ways)
    own = xp.arange(chunk, dtype=np.int32)
    return xp.concatenate([own + rank * chunk, own + (2 * ways - 1 - rank) * chunk])


def token_order(ways: int, length: int) -> np.ndarray:
    """The tokens of a sample in the order of the ranks that have them."""
    return np.concatenate([rank_positions(rank, ways, length, np) for rank in range(ways)])


def context_axes() -> Axes:
    """The manual mesh axes that split samples' tokens here; () where a rank has all of them."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in current_rules().seq if axis in manual)


def sum_over_context(x: Array) -> Array:
    """The sum of what the ranks that share a sample each have of it; x itself where a rank has all of it."""
    axes = context_axes()
    # XLA for GPUs would join a sum over `model` before with this one, wherever nobody else reads what comes between.
    return psum_shards(lax.optimization_barrier(x), axes) if axes else x


def sample_length(length: int) -> int:
    """Tokens of a sample of which this rank has so many."""
    return length * math.prod(lax.axis_size(axis) for axis in context_axes())


def from_first_context_rank(values: Float[Array, " batch"], length: int) -> Float[Array, " batch"]:
    """Values of samples, as the rank knows them that has a sample's first tokens: zeros where a rank's own `length`
    tokens begin later, so that the sum over the ranks that share the sample is the value."""
    places = local_positions(length)
    return values if places is None else jnp.where(places[0] == 0, values, 0)


def sum_of_preceding_chunks(held: Int[Array, "2 samples experts"], axes: Axes) -> Int[Array, "2 samples experts"]:
    """What all chunks of a sample before each of this rank's two have together.

    Args:
      held: what each of its two has.
      axes: whose ranks share the sample.
    """
    every, rank, ways = lax.all_gather(held, axes), lax.axis_index(axes), lax.axis_size(axes)
    in_order = jnp.concatenate([every[:, 0], every[::-1, 1]])
    before = jnp.cumsum(in_order, 0) - in_order
    return jnp.stack([before[rank], before[2 * ways - 1 - rank]])


def local_positions(length: int) -> Int[Array, " seq"] | None:
    """Where this rank's `length` tokens stand in their sample; None where they are all of it.

    Call it outside of loops over layers: `lax.scan` would take the rank's number out of them, and of the manual region.
    """
    axes = context_axes()
    if not axes:
        return None
    return rank_positions(lax.axis_index(axes), lax.axis_size(axes), length * lax.axis_size(axes))
