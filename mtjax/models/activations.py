"""Activation functions by name; gated ones take two projections."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """[batch, seq, 2, mlp], the gate first -> [batch, seq, mlp] (arXiv 2002.05202)."""
    return lambda x: activation(x[:, :, 0]) * x[:, :, 1]


_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def _gelu(x: Array) -> Array:
    """GELU by tanh (arXiv 1606.08415), in float32; in the type of x.

    Its gradient is written with the logistic function, of which the tanh is a form. XLA would compute the same tanh for
    both that and the value, which the backward pass needs again, in a kernel of its own for GPUs: it takes writing and
    reading it for cheaper than twice the tanh.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jnp.tanh(_SCALE * (wide + _CUBIC * wide**3)))).astype(x.dtype)


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    return _gelu(x), x


def _gelu_backward(x: Array, gradient: Array) -> tuple[Array]:
    wide = x.astype(jnp.float32)
    share = jax.nn.sigmoid(2 * _SCALE * (wide + _CUBIC * wide**3))
    slope = share * (1 + 2 * _SCALE * wide * (1 - share) * (1 + 3 * _CUBIC * wide**2))
    # In the type of x: a product in float32 is what XLA would keep for the bias' gradient.
    return (gradient * slope.astype(x.dtype),)


_gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def _gelu_exact(x: Array) -> Array:
    """GELU by the normal distribution (arXiv 1606.08415), in float32; in the type of x.

    Its gradient has the same distribution by another function, for the reason that `_gelu` gives.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * lax.erfc(-math.sqrt(0.5) * wide)).astype(x.dtype)


def _gelu_exact_forward(x: Array) -> tuple[Array, Array]:
    return _gelu_exact(x), x


def _gelu_exact_backward(x: Array, gradient: Array) -> tuple[Array]:
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * wide**2) / math.sqrt(2 * math.pi)
    slope = 0.5 * (1 + lax.erf(math.sqrt(0.5) * wide)) + wide * density
    return (gradient * slope.astype(x.dtype),)


_gelu_exact.defvjp(_gelu_exact_forward, _gelu_exact_backward)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_exact": _gelu_exact,
    "relu": jax.nn.relu,
    "swiglu": _gated(jax.nn.silu),
    "geglu": _gated(_gelu),
}
