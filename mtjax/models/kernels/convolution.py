"""The short causal convolution of layers with a recurrent state: each channel reads its own newest tokens."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.sharding.axes import varying_like


def causal_convolution(
    mixed: Float[Array, "b s u channels"],
    weights: Float[Array, "taps u channels"],
    bias: Float[Array, "u channels"] | None,
    before: Float[Array, "b taps-1 u channels"] | None,
    segments: Int[Array, "b tokens"] | None,
) -> Float[Array, "b s u channels"]:
    """Computes the convolution, and SiLU, in float32.

    Args:
      mixed: the channels, by groups.
      weights: of each channel; the last tap is the token's own.
      bias: of each channel, if any.
      before: inputs of the taps - 1 tokens before; zeros when None.
      segments: document of each token, which may begin with those of the tokens before: no tap crosses documents.
    """
    # Outside the custom_vjp, whose gradients have the types of its arguments: float32, and varying over ranks as the
    # channels do.
    weights = varying_like(weights.astype(jnp.float32), mixed)
    if bias is not None:
        bias = varying_like(bias.astype(jnp.float32), mixed)
    with jax.named_scope("conv"):
        return cast(Array, _convolved(mixed, weights, bias, before, segments))


@jax.custom_vjp
def _convolved(mixed: Array, weights: Array, bias: Array | None, before: Array | None, segments: Array | None) -> Array:
    return jax.nn.silu(_total(mixed, weights, bias, before, segments)).astype(mixed.dtype)


def _total(mixed: Array, weights: Array, bias: Array | None, before: Array | None, segments: Array | None) -> Array:
    total: Any = 0.0 if bias is None else bias
    for tap in range(len(weights)):
        total = total + _seen(tap, mixed, len(weights), before, segments) * weights[tap]
    return total


def _seen(tap: int, mixed: Array, taps: int, before: Array | None, segments: Array | None) -> Array:
    """Returns what a tap reads of each token's channels, in float32; zeros of other documents."""
    if before is None:
        seen = jnp.pad(mixed, [(0, 0), (taps - 1, 0), (0, 0), (0, 0)])
    else:
        seen = jnp.concatenate([before.astype(mixed.dtype), mixed], 1)
    seen = seen[:, tap : tap + mixed.shape[1]].astype(jnp.float32)
    return _of_document(seen, taps - 1 - tap, segments)


def _of_document(x: Array, back: int, segments: Array | None) -> Array:
    """Selects the tokens whose document is that of the token `back` before them."""
    if segments is None or not back:
        return x
    # `segments` may begin with the taps - 1 tokens before the samples: x has the last of them.
    same = jnp.pad(segments[:, back:] == segments[:, :-back], ((0, 0), (back, 0)))[:, -x.shape[1] :]
    return jnp.where(same[..., None, None], x, 0)


def _forward(*inputs: Any) -> tuple[Array, tuple[Any, ...]]:
    return _convolved(*inputs), inputs


def _backward(inputs: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    """Computes the gradients, tap by tap."""
    mixed, weights, bias, before, segments = inputs
    # XLA: without barriers, it would compute what each tap reads, in float32, with the recompute of a layer, and keep
    # all of it through the backward pass of the scan after the convolution.
    (mixed, gradient), taps, length = lax.optimization_barrier((mixed, gradient)), len(weights), mixed.shape[1]
    # Recomputed, as only the arguments are saved.
    _, back = jax.vjp(jax.nn.silu, _total(mixed, weights, bias, before, segments))
    (of_sum,) = back(gradient.astype(jnp.float32))
    of_seen: Any = 0.0
    of_weights = []
    for tap in range(taps):
        of_tap = (of_sum * _seen(tap, mixed, taps, before, segments)).sum((0, 1))
        of_sum, of_tap = lax.optimization_barrier((of_sum, of_tap))
        of_weights.append(of_tap)
        term = _of_document(of_sum * weights[tap], taps - 1 - tap, segments)
        of_seen = of_seen + jnp.pad(term, [(0, 0), (tap, taps - 1 - tap), (0, 0), (0, 0)])
    of_bias = None if bias is None else of_sum.sum((0, 1))
    of_before = None if before is None else of_seen[:, : taps - 1].astype(before.dtype)
    return of_seen[:, -length:].astype(mixed.dtype), jnp.stack(of_weights), of_bias, of_before, None


_convolved.defvjp(_forward, _backward)
