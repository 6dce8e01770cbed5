"""Options of attention's scores, for every kernel, and the kernel that materializes probabilities.

It runs on any device, with dropout, masks and biases.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int, Key

from mtjax.layout.attention_kernel import HIDDEN_SCORE
from mtjax.models.layer_context import LayerContext
from mtjax.models.ops import dropout
from mtjax.models.saved_names import ATTENTION_CORE, ATTENTION_OUTPUT
from mtjax.sharding.axes import spec, where

if TYPE_CHECKING:
    from mtjax.models.alibi import Alibi


@dataclass(frozen=True)
class AttentionOptions:
    """Settings of a layer's attention, and its parameters that scores read; by default GPT-2's without dropout."""

    dropout_rate: float = 0.0
    """Of the dropout on probabilities."""
    scale: float | None = None
    """Of the scores; head_dim^-0.5 when None."""
    softcap: float | None = None
    """When given, a score s is replaced by softcap * tanh(s / softcap), before bias and mask."""
    sinks: Float[Array, " heads"] | None = None
    """When given, a logit per head that is added to the softmax's denominator."""
    window: int | Int[Array, ""] | None = None
    """When given, a token attends to itself and the window - 1 tokens before it, and as many after it unless causal."""
    windows: tuple[int, ...] = ()
    """Windows of all layers, where they differ; one length, and others longer than a sample."""
    alibi: "Alibi | None" = None
    """When given, its biases are added to the scores."""
    largest_scores: Float[Array, " heads"] | None = None
    """When given, zeros whose gradient is each head's largest score that the mask shows, before cap and bias."""

    @property
    def adjusts_scores(self) -> bool:
        """Whether scores are more than scaled products before they are masked."""
        return any(setting is not None for setting in (self.softcap, self.alibi, self.largest_scores))

    def scale_of(self, width: int) -> float:
        """Returns the factor of the scores of heads of this width."""
        return width**-0.5 if self.scale is None else self.scale


HEADS = ("batch", "seq", "heads", "head_dim")
"""Logical names of the dimensions of queries and outputs."""
SCORES = ("batch", "heads", "seq", "key_seq")
"""Logical names of the dimensions of scores."""


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes self-attention with the mask and bias of a context."""
    if context.positions is not None:
        from mtjax.models.kernels.blocks import attend_across

        return attend_across("xla", query, key, value, context, options)
    if context.is_causal and context.segment_ids is None and options.window is None:
        mask = jnp.tril(jnp.ones((query.shape[1],) * 2, bool))[None, None]
    else:
        from mtjax.models.kernels.masks import attention_mask

        mask = attention_mask(query.shape[1], context, options.window)
    return softmax_attention(query, key, value, mask, options, context.dropout_keys, bias=context.bias)


def softmax_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch key_seq kv_heads head_dim"],
    value: Float[Array, "batch key_seq kv_heads head_dim"],
    mask: Bool[Array, "#batch 1 #seq key_seq"],
    options: AttentionOptions,
    dropout_keys: Key[Array, " batch"] | None,
    *,
    bias: Float[Array, "#batch heads seq key_seq"] | None = None,
    site: int = 0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes attention from each query to the keys for which its mask is True, normalized in float32.

    heads / kv_heads consecutive query heads share a KV head. `bias` is added to the scores. Dropout of the
    probabilities has one key per sample, and the site `site`; it is off if `dropout_keys` is None.
    """
    (batch, seq, heads, width), kv_heads = query.shape, key.shape[2]
    # Cheaper than scaling the scores.
    query = query * options.scale_of(width)
    query = query.reshape(batch, seq, kv_heads, -1, width, out_sharding=spec("batch", "seq", "heads", None, None))
    # XLA: the results of both products have einsum's natural order of dimensions: batch, left, right. Any other order
    # would add a transpose of an array of seq x key_seq.
    scores = _scores(query.transpose(0, 2, 3, 1, 4), key)
    scores = scores.reshape(batch, heads, *scores.shape[3:], out_sharding=spec(*SCORES))
    if options.adjusts_scores or bias is not None:
        from mtjax.models.kernels.scores import adjusted

        scores = adjusted(scores, mask, options, bias)
    scores = where(mask, scores, HIDDEN_SCORE)
    if options.sinks is None:
        probabilities = _softmax(scores)
    else:
        from mtjax.models.kernels.scores import named_softmax_with_sinks

        probabilities = named_softmax_with_sinks(scores, options.sinks)
    probabilities = dropout(
        probabilities.astype(query.dtype), options.dropout_rate, dropout_keys, site, SCORES, saved_as=ATTENTION_CORE
    )
    grouped = spec("batch", "heads", None, "seq", "key_seq")
    probabilities = probabilities.reshape(batch, kv_heads, -1, *probabilities.shape[2:], out_sharding=grouped)
    mixed, shape = _mixed(probabilities, value), (batch, seq, heads, value.shape[-1])
    return checkpoint_name(mixed.transpose(0, 3, 1, 2, 4).reshape(shape, out_sharding=spec(*HEADS)), ATTENTION_OUTPUT)


@jax.custom_vjp
def _scores(
    query: Float[Array, "batch kv_heads group_heads seq head_dim"], key: Float[Array, "batch key_seq kv_heads head_dim"]
) -> Float[Array, "batch kv_heads group_heads seq key_seq"]:
    """Computes products of queries and keys in float32."""
    # A custom vjp, because autodiff would multiply float32 gradients in float32. Here they are cast to the compute type
    # first, as in flash attention.
    return jnp.einsum("bgnqd,bkgd->bgnqk", query, key, preferred_element_type=jnp.float32)


def _scores_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(query, key), (query, key)


def _scores_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients of query and key from that of the scores [batch, kv_heads, group_heads, seq, key_seq]."""
    query, key = saved
    gradient = gradient.astype(query.dtype)
    d_query = jnp.einsum("bgnqk,bkgd->bgnqd", gradient, key)
    return d_query, jnp.einsum("bgnqk,bgnqd->bkgd", gradient, query)


_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def _mixed(
    probabilities: Float[Array, "batch kv_heads group_heads seq key_seq"],
    value: Float[Array, "batch key_seq kv_heads head_dim"],
) -> Float[Array, "batch kv_heads group_heads seq head_dim"]:
    """Computes the values weighted by probabilities."""
    return jnp.einsum("bgnqk,bkgd->bgnqd", probabilities, value)


def _mixed_forward(probabilities: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
    return _mixed(probabilities, value), (probabilities, value)


def _mixed_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients of probabilities and value from that of the output, [batch, kv_heads, group_heads, seq,
    head_dim]."""
    probabilities, value = saved
    d_value = jnp.einsum("bgnqk,bgnqd->bkgd", probabilities, gradient)
    d_probabilities = jnp.einsum("bgnqd,bkgd->bgnqk", gradient, value)
    # XLA: with the barrier both are computed before either is used. The probabilities, which only `d_value` reads, can
    # then be freed before the gradients of the scores are allocated.
    return lax.optimization_barrier((d_probabilities, d_value))


_mixed.defvjp(_mixed_forward, _mixed_backward)


@jax.custom_jvp
def _softmax(scores: Float[Array, "batch heads seq key_seq"]) -> Float[Array, "batch heads seq key_seq"]:
    """Computes softmax over keys; its named, unrounded result is what the backward pass reads."""
    # The derivative of `jax.nn.softmax` reads the result before it has a name for the recompute policy, so the scores
    # would be recomputed.
    return _named_softmax(scores)


def _named_softmax(scores: Array) -> Array:
    return checkpoint_name(jax.nn.softmax(scores, axis=-1), ATTENTION_CORE)


@_softmax.defjvp
def _softmax_derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    probabilities = _named_softmax(*primals)  # not `_softmax`: names inside a custom_jvp are not seen
    slope = probabilities * tangents[0]
    return probabilities, slope - probabilities * slope.sum(-1, keepdims=True)
