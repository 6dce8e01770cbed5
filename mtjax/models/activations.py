"""Activation functions by name; gated ones take two projections."""

import math
from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """[batch, seq, 2, mlp], the gate first -> [batch, seq, mlp] (arXiv 2002.05202)."""
    return lambda x: activation(x[:, :, 0]) * x[:, :, 1]


@jax.custom_vjp
def _gelu(x: Array) -> Array:
    """x times s(2u), with u = sqrt(2/pi) (x + 0.044715 x^3): arXiv 1606.08415, with s(2u) as (1 + tanh(u)) / 2."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    return _gelu(x), x


def _gelu_backward(x: Array, gradient: Array) -> tuple[Array]:
    """s + 2 x s (1 - s) u', in float32.

    Not from the tanh, which the backward pass also needs for the result itself: XLA would write it out for both.
    """
    wide = x.astype(jnp.float32)
    scale, cube = math.sqrt(2 / math.pi), 0.044715
    s = jax.nn.sigmoid(2 * scale * (wide + cube * wide**3))
    slope = s + 2 * wide * s * (1 - s) * scale * (1 + 3 * cube * wide**2)
    return (gradient * slope.astype(x.dtype),)


_gelu.defvjp(_gelu_forward, _gelu_backward)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": _gated(jax.nn.silu),
    "geglu": _gated(_gelu),
}
