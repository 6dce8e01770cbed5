"""Activation functions by name; gated ones have two projections as input."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.unstack import is_unrolled


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Gates an activation: [batch, seq, 2, mlp], the gate first -> [batch, seq, mlp] (GLU, arXiv 2002.05202)."""

    def gated(x: Array) -> Array:
        gate, up = _halves(x)
        return activation(gate) * up

    return gated


def _halves(x: Array) -> tuple[Array, Array]:
    """Takes gate and up, [batch, seq, mlp] each, out of [batch, seq, 2, mlp]."""
    if not is_unrolled():
        return x[:, :, 0], x[:, :, 1]
    # XLA: the gradient of a split is a concatenation, of which each product's gradient reads its part.
    gate, up = jnp.split(x, 2, axis=2)
    return gate.squeeze(2), up.squeeze(2)


def _swiglu_clamped(x: Array) -> Array:
    """Computes gpt-oss's gated activation: the gate is clamped above, the other half on both sides, and 1 is added to
    it."""
    wide = x.astype(jnp.float32)
    gate, up = _halves(wide)
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return ((up + 1) * gate * jax.nn.sigmoid(_STEEPNESS * gate)).astype(x.dtype)


_LIMIT, _STEEPNESS = 7.0, 1.702
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Array) -> Array:
    """Computes the tanh approximation of GELU (arXiv 1606.08415)."""
    return 0.5 * x * (1 + jnp.tanh(_SCALE * (x + _CUBIC * x**3)))


def _gelu_slope(x: Array) -> Array:
    """Computes the derivative of `_gelu`, by `(1 + tanh(u)) / 2 = sigmoid(2 u)`."""
    sigmoid = jax.nn.sigmoid(2 * _SCALE * (x + _CUBIC * x**3))
    return sigmoid * (1 + 2 * _SCALE * x * (1 - sigmoid) * (1 + 3 * _CUBIC * x**2))


def _gelu_exact(x: Array) -> Array:
    """Computes GELU by the normal distribution (arXiv 1606.08415)."""
    return 0.5 * x * lax.erfc(-math.sqrt(0.5) * x)


def _gelu_exact_slope(x: Array) -> Array:
    """Computes the derivative of `_gelu_exact`: the distribution function plus x times the density."""
    density = jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + lax.erf(math.sqrt(0.5) * x)) + x * density


def _with_slope(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Builds an activation from its value and its derivative, computed in float32; the result has the type of x."""

    # XLA: the derivative uses another function than the value: sigmoid instead of tanh, erf instead of erfc. Of the
    # same function in both, which the backward pass recomputes, XLA for GPUs would write the result to memory in a
    # separate kernel, as it estimates that to be cheaper than computing it twice.

    @jax.custom_vjp
    def activation(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return activation(x), x

    def backward(x: Array, gradient: Array) -> tuple[Array]:
        # XLA: a product in float32 would be written out for the bias' gradient, so the slope is cast first.
        return (gradient * slope(x.astype(jnp.float32)).astype(x.dtype),)

    activation.defvjp(forward, backward)
    return activation


_gelu_with_slope = _with_slope(_gelu, _gelu_slope)
_gelu_exact_with_slope = _with_slope(_gelu_exact, _gelu_exact_slope)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu_with_slope,
    "gelu_exact": _gelu_exact_with_slope,
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": _gated(jax.nn.silu),
    "swiglu_clamped": _swiglu_clamped,
    "geglu": _gated(_gelu_with_slope),
    "geglu_exact": _gated(_gelu_exact_with_slope),
}
