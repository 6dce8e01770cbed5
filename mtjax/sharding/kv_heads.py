"""Fewer key and value heads than model ways: every rank has all of them and uses the one it needs.

The query heads of a rank then belong to a single group, so a rank computes with one key and one value head. Each rank
has a part of their gradient; the parts are summed over the ranks in float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.sharding.axes import dimension_axes, spec


def heads_in_use(parameter: Array) -> Array:
    """Splits a parameter of key and value heads over the ranks that compute with them.

    Args:
      parameter: [..., kv_heads, head_dim], split over the ranks or replicated on each.

    Returns:
      Itself when it is split; else [..., ranks, head_dim], split, where rank r has head r * kv_heads / ranks.
    """
    split = dimension_axes(spec("heads"), 0)
    if not split or dimension_axes(spec("kv_heads"), 0) == split:
        return parameter
    sizes = jax.sharding.get_abstract_mesh().shape
    ranks, heads = math.prod(sizes[axis] for axis in split), parameter.shape[-2]
    # A product with zeros and ones is a slice, and its transpose a sum over the ranks. A shard_map that asks for its
    # rank would not lower here: the scan over layers hoists the rank's number out of the map, and out of the region in
    # which `data` is manual.
    own = jnp.arange(ranks)[:, None] * heads // ranks == jnp.arange(heads)
    place = spec(*(None,) * (parameter.ndim - 2), "heads", None)
    return jnp.einsum(
        "rg,...gd->...rd",
        own.astype(jnp.float32),
        parameter.astype(jnp.float32),  # ZeRO-3 may have gathered it in 16 bits
        precision=jax.lax.Precision.HIGHEST,  # exact: one term of each sum is not 0
        out_sharding=place,
    )
