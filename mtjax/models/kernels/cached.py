"""Attention to a cache of keys and values."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from mtjax.models.kernels.xla import HEADS, HIDDEN_SCORE
from mtjax.models.kv_cache import CachePositions, KVCache
from mtjax.sharding.axes import spec


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    cache: KVCache,
    reading: CachePositions,
    bias: Float[Array, "#batch heads seq key_seq"] | None = None,
    scale: float | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax attention from new tokens to all that the cache holds up to each of them, normalised in float32."""
    keys, values = cache.read_by(reading)
    seen = jnp.arange(cache.length) <= reading.positions[:, :, None]
    return attend_grouped(query, keys, values, seen, bias, scale)


def attend_grouped(
    query: Float[Array, "batch seq heads head_dim"],
    keys: Float[Array, "batch groups length head_dim"],
    values: Float[Array, "batch groups length head_dim"],
    seen: Bool[Array, "#batch #seq length"],
    bias: Float[Array, "#batch heads seq length"] | None,
    scale: float | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Attention to keys that lie by groups. All queries of a group are rows of one product with its keys.

    Args:
      query: heads / groups queries in turn share a group.
      keys: as many as values.
      values: what is mixed.
      seen: [#batch, #seq, length], True where a query sees a key.
      bias: [#batch, heads, seq, length], added to the scores.
      scale: of the scores; head_dim^-0.5 when None.
    """
    batch, seq, heads, width = query.shape
    groups, length = keys.shape[1:3]
    grouped = spec("batch", "heads", None, "seq", None)
    query = (query * (width**-0.5 if scale is None else scale)).transpose(0, 2, 1, 3)
    query = query.reshape(batch, groups, -1, width, out_sharding=spec("batch", "heads", None, "head_dim"))
    scores = jnp.einsum("bgqd,bgkd->bgqk", query, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, groups, heads // groups, seq, length, out_sharding=grouped)
    if bias is not None:
        scores += bias.reshape(bias.shape[0], groups, -1, *bias.shape[2:], out_sharding=grouped)
    probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], scores, HIDDEN_SCORE), axis=-1)
    probabilities = probabilities.astype(values.dtype)
    probabilities = probabilities.reshape(
        batch, groups, -1, length, out_sharding=spec("batch", "heads", None, "key_seq")
    )
    mixed = jnp.einsum("bgqk,bgkd->bgqd", probabilities, values)
    mixed = mixed.reshape(batch, groups, heads // groups, seq, width, out_sharding=grouped).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, seq, heads, width, out_sharding=spec(*HEADS))
