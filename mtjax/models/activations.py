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


def _gelu(x: Array) -> Array:
    """GELU by tanh (arXiv 1606.08415)."""
    return 0.5 * x * (1 + jnp.tanh(_SCALE * (x + _CUBIC * x**3)))


def _gelu_slope(x: Array) -> Array:
    share = jax.nn.sigmoid(2 * _SCALE * (x + _CUBIC * x**3))
    return share * (1 + 2 * _SCALE * x * (1 - share) * (1 + 3 * _CUBIC * x**2))


def _gelu_exact(x: Array) -> Array:
    """GELU by the normal distribution (arXiv 1606.08415)."""
    return 0.5 * x * lax.erfc(-math.sqrt(0.5) * x)


def _gelu_exact_slope(x: Array) -> Array:
    density = jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + lax.erf(math.sqrt(0.5) * x)) + x * density


def _by_hand(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An activation with its slope, both computed in float32; in the type of what it is given.

    The slope is written with another function than the value: the logistic function is a form of the tanh, and so is
    the error function of its complement. XLA would compute the same one for both the slope and the value, which the
    backward pass needs again, in a kernel of its own for GPUs: it takes writing and reading it for cheaper than twice
    such a function.
    """

    @jax.custom_vjp
    def activation(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return activation(x), x

    def backward(x: Array, gradient: Array) -> tuple[Array]:
        # In the type of x: a product in float32 is what XLA would keep for the bias' gradient.
        return (gradient * slope(x.astype(jnp.float32)).astype(x.dtype),)

    activation.defvjp(forward, backward)
    return activation


_gelu_by_hand = _by_hand(_gelu, _gelu_slope)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu_by_hand,
    "gelu_exact": _by_hand(_gelu_exact, _gelu_exact_slope),
    "relu": jax.nn.relu,
    "swiglu": _gated(jax.nn.silu),
    "geglu": _gated(_gelu_by_hand),
}
