"""Grouped-query attention with fewer KV heads than the tensor parallel degree: ranks select the head that they need.
The same holds for groups of heads of a state-space layer.

All KV heads are replicated then. The query heads of a rank belong to a single group, so a rank computes with one key
and one value head. Its gradient is a partial sum, which is reduced over the ranks in float32.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.sharding.axes import dimension_axes, num_shards, spec


def heads_in_use(parameter: Array, name: str = "kv_heads") -> Array:
    """Shards a parameter of KV heads, or of other groups of heads, over the ranks that compute with them.

    Args:
      parameter: [..., kv_heads, head_dim], sharded by heads or replicated.
      name: logical name of the heads' dimension.

    Returns:
      The parameter if it is sharded; else [..., ranks, head_dim], sharded, where rank r has head r * kv_heads / ranks.
    """
    axes = dimension_axes(spec("heads"), 0)
    if not axes or dimension_axes(spec(name), 0) == axes:
        return parameter
    ranks, heads = num_shards("heads"), parameter.shape[-2]
    # A product with a one-hot matrix is a slice, and its transpose a reduction over ranks. A `shard_map` with
    # `axis_index` would not lower here: the scan over layers hoists the index out of the map, and out of the manual
    # region.
    sharding = spec(*(None,) * (parameter.ndim - 2), "heads", None)
    return jnp.einsum(
        "rg,...gd->...rd",
        heads_of_ranks(ranks, heads),
        parameter.astype(jnp.float32),  # ZeRO-3 may have gathered it in 16 bits
        precision=jax.lax.Precision.HIGHEST,  # exact: one term of each sum is not 0
        out_sharding=sharding,
    )


def heads_of_ranks(ranks: int, heads: int) -> Float[Array, "ranks heads"]:
    """Returns 1 where a rank computes with a head, or with another group of heads, else 0; ranks are more."""
    return (jnp.arange(ranks)[:, None] * heads // ranks == jnp.arange(heads)).astype(jnp.float32)


def groups_in_use(groups: int) -> int:
    """Returns the number of groups of heads that ranks compute: one each where ranks are more."""
    return max(groups, num_shards("heads"))
