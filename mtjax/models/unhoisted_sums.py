"""Adds arrays that are equal for all samples, without hoisting their broadcasts: see `no_hoist`."""

import jax
from jax import Array
from jaxtyping import Float

from mtjax.sharding.axes import no_hoist, varying_like


def plus(x: Float[Array, "batch ..."], bias: Float[Array, "1 ..."]) -> Float[Array, "batch ..."]:
    """Adds a bias that is equal for all samples."""
    return _plus(x, varying_like(bias, x))


@jax.custom_vjp
def plus_difference(x: Float[Array, "..."], bias: Float[Array, "..."], minus: Float[Array, "..."]) -> Array:
    """Adds `bias - minus`, constants which may have dimensions of 1."""
    return no_hoist(lambda x, bias, minus: x + (bias - minus), x, bias, minus)


plus_difference.defvjp(
    lambda x, bias, minus: (plus_difference(x, bias, minus), None), lambda _, gradient: (gradient, None, None)
)


@jax.custom_vjp
def _plus(x: Array, bias: Array) -> Array:
    return no_hoist(lambda x, bias: x + bias, x, bias)


def _plus_forward(x: Array, bias: Array) -> tuple[Array, None]:
    return _plus(x, bias), None


def _plus_backward(_: None, gradient: Array) -> tuple[Array, Array]:
    """Returns the gradient of x, [batch, ...], and its sum over samples for the bias, [1, ...]."""
    return gradient, gradient.sum(0, keepdims=True)


_plus.defvjp(_plus_forward, _plus_backward)
