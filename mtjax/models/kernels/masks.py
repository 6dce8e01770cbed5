"""Masks of self-attention: causal or not, within segments and windows."""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int

from mtjax.models.layer_context import LayerContext
from mtjax.sharding.axes import no_hoist


def attention_mask(
    length: int, context: LayerContext, window: int | Int[Array, ""] | None = None
) -> Bool[Array, "#batch 1 seq key_seq"]:
    """Returns the mask of self-attention over `length` tokens: True where a query (dimension 2) attends to a key
    (3)."""
    if context.is_causal:
        return causal_mask(length, context.segment_ids, window)
    if window is None:
        near = jnp.ones((1, 1, length, length), bool)
    else:
        near = no_hoist(partial(_near, length, is_causal=False), jnp.asarray(window))[None, None]
    return near if context.segment_ids is None else near & _same_segment(context.segment_ids)


def causal_mask(
    length: int, segment_ids: Int[Array, "batch seq"] | None, window: int | Int[Array, ""] | None = None
) -> Bool[Array, "#batch 1 seq key_seq"]:
    """Returns the causal mask: True where a query (dimension 2) attends to a key (3), itself or one before it.

    With a window, only the window - 1 tokens before it; one selected by the layer's number makes the layer's own mask.
    """
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if isinstance(window, int):
        # A static window needs no mask of the layer's own: one array serves all layers.
        causal = jnp.triu(causal, 1 - window)
    elif window is not None:
        # XLA: the distances alone would be hoisted out of the scan over layers, in 32 bits.
        causal = no_hoist(partial(_near, length), window)[None, None]
    if segment_ids is None:
        return causal
    return causal & _same_segment(segment_ids)


def _near(length: int, window: Array, *, is_causal: bool = True) -> Bool[Array, "seq key_seq"]:
    """Returns the mask with a window, which is on both sides of a token unless causal."""
    back = lax.broadcasted_iota(jnp.int32, (length, length), 0) - lax.broadcasted_iota(jnp.int32, (length, length), 1)
    return (back >= 0) & (back < window) if is_causal else jnp.abs(back) < window


def _same_segment(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch 1 seq key_seq"]:
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
