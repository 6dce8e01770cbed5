"""`where` with a number and addition of a smaller array, without hoisting out of the scan over layers.

`lax.scan` hoists what is computed from constants alone, such as a number, a mask or a bias broadcast to the shape of
attention scores. The program would materialize that array, keep it alive through the step, and read it in every layer.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from mtjax.sharding.axes import varying_like
from mtjax.sharding.no_hoist import no_hoist


def where(keep: Bool[Array, "..."], x: Float[Array, "..."], otherwise: float) -> Float[Array, "..."]:
    """Selects `x` where `keep`, which may have dimensions of 1, and the number `otherwise` elsewhere."""
    return cast(Array, _where(keep, x, otherwise))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _where(keep: Array, x: Array, otherwise: float) -> Array:
    return no_hoist(lambda keep, x: jnp.where(keep, x, otherwise), keep, x)


def _where_forward(keep: Array, x: Array, otherwise: float) -> tuple[Array, Array]:
    return where(keep, x, otherwise), keep


def _where_backward(_: float, keep: Array, gradient: Array) -> tuple[None, Array]:
    """Selects the gradient, in the shape of x, where `keep`."""
    return None, where(keep, gradient, 0.0)


_where.defvjp(_where_forward, _where_backward)


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
