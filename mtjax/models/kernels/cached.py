"""Attention to a KV cache."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from mtjax.layout.attention_kernel import HIDDEN_SCORE
from mtjax.models.kernels.scores import softmax_with_sinks
from mtjax.models.kernels.xla import HEADS, AttentionOptions
from mtjax.models.kv_cache import CachePositions, LatentCache
from mtjax.models.layer_context import LayerContext
from mtjax.models.quantized_cache import Scaled, numbers_and_scales
from mtjax.sharding.axes import spec

if TYPE_CHECKING:
    from mtjax.models.relative import RelativeBias


def append_and_attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    context: LayerContext,
    cache: Any,
    options: AttentionOptions,
    relative: "RelativeBias | None",
) -> tuple[Float[Array, "batch seq heads head_dim"], Any]:
    """Appends keys and values to a `KVCache` or `WindowKVCache`, and attends to all that it has.

    Returns:
      The output, and the cache.
    """
    assert context.cache_positions is not None
    cache, keys, values, at = cache.extended(key, value, context.cache_positions)
    bias = context.bias
    if relative is not None:
        bias = relative.at(context.cache_positions.positions, cache.length)
    return attend_cached(query, keys, values, at, context.cache_positions, options, bias), cache


def attend_cached(
    query: Float[Array, "batch seq heads head_dim"],
    keys: Float[Array, "batch kv_heads length head_dim"] | Scaled,
    values: Float[Array, "batch kv_heads length head_dim"] | Scaled,
    key_positions: Int[Array, "batch length"] | None,
    cache_positions: CachePositions,
    options: AttentionOptions,
    bias: Float[Array, "#batch heads seq key_seq"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes softmax attention from new tokens to the cached tokens up to each of them, normalized in float32.

    Args:
      query: of the new tokens.
      keys: of the cached ones.
      values: of the cached ones.
      key_positions: of the cached ones, negative for none; 0, 1, ... when None.
      cache_positions: of the new tokens.
      options: with the window.
      bias: added to the scores.
    """
    length = (keys.numbers if isinstance(keys, Scaled) else keys).shape[2]
    at = jnp.arange(length) if key_positions is None else key_positions
    return attend_grouped(query, keys, values, *_visible(at, cache_positions, options, bias))


def _visible(
    at: Array, cache_positions: CachePositions, options: AttentionOptions, bias: Array | None
) -> tuple[Array, AttentionOptions, Array | None]:
    """Returns the mask from new tokens to those at positions `at`, [batch, seq, length], the options, and the bias of
    the scores."""
    keys, positions = at, cache_positions.positions[:, :, None]
    is_visible: Any = True
    # A window's cache is a ring: each sequence has its own positions in it, and slots that were never written.
    if at.ndim > 1:
        at, is_visible = at[:, None], at[:, None] >= 0
    # Tokens of a chunk of the prompt are in the cache already when it is read: later ones are hidden here.
    is_visible &= at <= positions
    if options.window is not None:
        is_visible &= positions - at < options.window
    if options.alibi is not None:
        distances = options.alibi.of_distances(cache_positions.positions, keys)
        bias = distances if bias is None else bias + distances
    return is_visible, options, bias


def attend_grouped(
    query: Float[Array, "batch seq heads head_dim"],
    keys: Float[Array, "batch kv_heads length head_dim"] | Scaled,
    values: Float[Array, "batch kv_heads length head_dim"] | Scaled,
    is_visible: Bool[Array, "#batch #seq length"],
    options: AttentionOptions,
    bias: Float[Array, "#batch heads seq length"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes attention to keys in the layout of a cache. All queries of a group are rows of one product with its
    keys.

    Args:
      query: heads / kv_heads consecutive query heads share a KV head.
      keys: keys.
      values: values.
      is_visible: [#batch, #seq, length], True where a query attends to a key.
      options: what is done with the scores; there is no dropout.
      bias: [#batch, heads, seq, length], added to the scores.
    """
    # In decode seq is 1: the product of one query with the keys would be a matrix-vector product per head. The queries
    # of a group share their keys, so all of them are rows of one matrix product.
    batch, seq, heads, width = query.shape
    # Numbers of 8 bits are multiplied as they are; their scales are those of scores, and of probabilities.
    (keys, key_scales), (values, value_scales) = (numbers_and_scales(each, query.dtype) for each in (keys, values))
    kv_heads, length = keys.shape[1:3]
    grouped = spec("batch", "heads", None, "seq", None)
    # Scaled before the product: queries are fewer than scores.
    query = (query * options.scale_of(width)).transpose(0, 2, 1, 3)
    query = query.reshape(batch, kv_heads, -1, width, out_sharding=spec("batch", "heads", None, "head_dim"))
    scores = jnp.einsum("bgqd,bgkd->bgqk", query, keys, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, heads // kv_heads, seq, length, out_sharding=grouped)
    # Before the cap and the biases, which apply to scores of the real size.
    if key_scales is not None:
        scores *= key_scales[:, :, None, None]
    scores = _capped(scores, options.softcap)
    if bias is not None:
        scores += bias.reshape(bias.shape[0], kv_heads, -1, *bias.shape[2:], out_sharding=grouped)
    scores = jnp.where(is_visible[:, None, None], scores, HIDDEN_SCORE)
    if options.sinks is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
    else:
        sinks = options.sinks.reshape(kv_heads, -1, 1, 1, out_sharding=spec("heads", None, None, None))
        probabilities = softmax_with_sinks(scores, sinks)
    # A scale is that of a token's value, so it may multiply the token's probability instead.
    if value_scales is not None:
        probabilities *= value_scales[:, :, None, None]
    probabilities = probabilities.astype(values.dtype)
    probabilities = probabilities.reshape(
        batch, kv_heads, -1, length, out_sharding=spec("batch", "heads", None, "key_seq")
    )
    # Rows of a group are (head, token); back to [batch, seq, heads, head_dim].
    mixed = jnp.einsum("bgqk,bgkd->bgqd", probabilities, values)
    mixed = mixed.reshape(batch, kv_heads, heads // kv_heads, seq, width, out_sharding=grouped).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, seq, heads, width, out_sharding=spec(*HEADS))


def attend_latent(
    query: Float[Array, "batch seq heads width"],
    cache: LatentCache,
    latent: int,
    cache_positions: CachePositions,
    options: AttentionOptions,
    bias: Float[Array, "#batch heads seq key_seq"] | None = None,
) -> Float[Array, "batch seq heads latent"]:
    """Computes softmax attention from new tokens to the cached latents up to each of them, normalized in float32.

    Args:
      query: of the cache's width.
      cache: with the latents of the new tokens; all heads attend to the same.
      latent: leading elements of a cached vector that are mixed; the others only have scores.
      cache_positions: of the new tokens.
      options: with the scale; there are neither dropout nor sinks.
      bias: added to the scores.
    """
    assert options.scale is not None and options.sinks is None
    # One key for all heads: nothing is repeated for them.
    keys = cache.read_by(cache_positions)
    is_visible, _, bias = _visible(jnp.arange(cache.length), cache_positions, options, bias)
    scores = jnp.einsum(
        *("bqhc,bkc->bhqk", query * options.scale, keys),
        preferred_element_type=jnp.float32,
        out_sharding=spec("batch", "heads", "seq", "key_seq"),
    )
    scores = _capped(scores, options.softcap)
    scores = scores if bias is None else scores + bias
    probabilities = jax.nn.softmax(jnp.where(is_visible[:, None], scores, HIDDEN_SCORE), axis=-1).astype(keys.dtype)
    return jnp.einsum("bhqk,bkc->bqhc", probabilities, keys[..., :latent], out_sharding=spec(*HEADS))


def _capped(scores: Float[Array, "..."], softcap: float | None) -> Float[Array, "..."]:
    """Caps scores, where there is a cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
