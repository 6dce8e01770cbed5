"""Activation functions by name."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

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


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _with_slope(_gelu, _gelu_slope),
    "gelu_exact": _with_slope(_gelu_exact, _gelu_exact_slope),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def activation_of(name: str) -> Callable[[Array], Array]:
    """Returns the function of the setting `activation`, gated or not."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]
    from mtjax.models.gated_activations import gated_activation

    return gated_activation(name)
