"""`where` with a number, without hoisting out of the scan over layers.

`lax.scan` hoists what is computed from constants alone, such as a number, a mask or a bias broadcast to the shape of
attention scores. The program would materialize that array, keep it alive through the step, and read it in every layer.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

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
