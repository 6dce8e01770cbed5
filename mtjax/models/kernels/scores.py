"""What some models do with attention scores: ALiBi's biases, a soft cap, sinks."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from mtjax.layout.attention_kernel import HIDDEN_SCORE
from mtjax.models.alibi import Alibi
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.saved_names import ATTENTION_CORE, ATTENTION_STATISTICS
from mtjax.models.unhoisted_sums import plus, plus_difference
from mtjax.sharding.axes import where


def adjusted(
    scores: Float[Array, "batch heads seq key_seq"],
    mask: Bool[Array, "#batch 1 #seq key_seq"],
    options: AttentionOptions,
    bias: Float[Array, "1 heads seq key_seq"] | None,
) -> Float[Array, "batch heads seq key_seq"]:
    """Caps scores and adds biases, as options say, and observes them before."""
    if options.largest_scores is not None:
        scores = observed(scores, mask, options.largest_scores)
    if options.softcap is not None:
        scores = cap(options.softcap, scores)
    if options.alibi is not None:
        scores = tilt(scores, options.alibi)
    if bias is not None:
        scores = plus(scores, bias)
    return scores


def tilt(scores: Float[Array, "batch heads seq key_seq"], alibi: Alibi) -> Float[Array, "batch heads seq key_seq"]:
    """Adds ALiBi's biases."""
    # XLA: computed with the scores in one fusion; all pairs of positions would be hoisted out of the scan over layers.
    of_keys = alibi.at(jnp.arange(scores.shape[-1]), alibi.by_head()[:, None])
    return plus_difference(scores, of_keys[None, :, None, :], of_keys[None, :, :, None])


@jax.custom_vjp
def observed(
    scores: Float[Array, "batch heads seq key_seq"],
    mask: Bool[Array, "#batch 1 #seq key_seq"],
    zeros: Float[Array, " heads"],
) -> Float[Array, "batch heads seq key_seq"]:
    """Returns scores; the gradient of `zeros` is the largest score of each head where the mask is True."""
    return scores


def _observed_forward(scores: Array, mask: Array, zeros: Array) -> tuple[Array, Array]:
    # Named, so that it is saved, where scores are recomputed, too: recompute would otherwise need all scores for it.
    largest = where(mask, scores, HIDDEN_SCORE).max((0, 2, 3))
    return scores, checkpoint_name(largest, ATTENTION_STATISTICS)


def _observed_backward(largest: Array, gradient: Array) -> tuple[Array, None, Array]:
    return gradient, None, largest


observed.defvjp(_observed_forward, _observed_backward)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def cap(softcap: float, scores: Array) -> Array:
    """Computes `softcap * tanh(scores / softcap)`; its named tanh is what the backward pass reads."""
    return softcap * _named_tanh(softcap, scores)


def _named_tanh(softcap: float, scores: Array) -> Array:
    return checkpoint_name(jnp.tanh(scores / softcap), ATTENTION_CORE)


@cap.defjvp
def _cap_derivative(softcap: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    tanh = _named_tanh(softcap, *primals)
    return softcap * tanh, (1 - jnp.square(tanh)) * tangents[0]


@jax.custom_jvp
def named_softmax_with_sinks(
    scores: Float[Array, "batch heads seq key_seq"], sinks: Float[Array, " heads"]
) -> Float[Array, "batch heads seq key_seq"]:
    """Computes softmax over keys and a head's sink; its named result is what the backward pass reads."""
    return checkpoint_name(softmax_with_sinks(scores, sinks[:, None, None]), ATTENTION_CORE)


@named_softmax_with_sinks.defjvp
def _softmax_with_sinks_derivative(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """Computes the probabilities, [batch, heads, queries, keys], and their derivative along `tangents`."""
    probabilities = checkpoint_name(softmax_with_sinks(primals[0], primals[1][:, None, None]), ATTENTION_CORE)
    slope = probabilities * tangents[0]
    # The sink has the rest of the probability, and no value.
    rest = (1 - probabilities.sum(-1, keepdims=True)) * tangents[1][:, None, None]
    return probabilities, slope - probabilities * (slope.sum(-1, keepdims=True) + rest)


def softmax_with_sinks(scores: Float[Array, "... key_seq"], sinks: Float[Array, "..."]) -> Float[Array, "... key_seq"]:
    """Computes softmax over keys whose denominator has one more logit, `sinks`, [..., 1]."""
    # Also the sink's: exp(sinks - highest) would overflow where a row's scores are far below it.
    highest = jnp.maximum(scores.max(-1, keepdims=True), sinks)
    weights = jnp.exp(scores - highest)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - highest))
