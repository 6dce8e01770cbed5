"""Activations beside GELU by tanh (`mtjax.models.ops`): exact GELU, ReLU, its square, and gated ones."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.models.ops import with_slope


def _gelu_exact(x: Array) -> Array:
    """Computes GELU by the normal distribution (arXiv 1606.08415)."""
    return 0.5 * x * lax.erfc(-math.sqrt(0.5) * x)


def _gelu_exact_slope(x: Array) -> Array:
    """Computes the derivative of `_gelu_exact`: the distribution function, by erf, plus x times the density."""
    density = jnp.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + lax.erf(math.sqrt(0.5) * x)) + x * density


UNGATED: Mapping[str, Callable[[Array], Array]] = {
    "gelu_exact": with_slope(_gelu_exact, _gelu_exact_slope),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


def other_activation(name: str) -> Callable[[Array], Array]:
    """Returns the function of the setting `activation`, if it is not gelu."""
    if name in UNGATED:
        return UNGATED[name]
    from mtjax.models.gated_activations import gated_activation

    return gated_activation(name)
