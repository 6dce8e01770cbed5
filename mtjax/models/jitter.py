"""Random factors that depend on the sample alone, so that they are the same on every mesh."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int, Key

from mtjax.models.threefry import random_bits
from mtjax.sharding.axes import no_hoist, spec


def jitter(
    x: Array,
    distance: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    positions: Int[Array, " seq"] | None = None,
) -> Array:
    """Multiplies `x` by numbers from U(1 - `distance`, 1 + `distance`).

    Returns `x` when `keys` is None or `distance` 0. The other arguments are those of
    `mtjax.models.ops.dropout`, and the numbers too depend on the sample alone.
    """
    if keys is None or distance == 0:
        return x

    def of_sample(key: Array, positions: Array | None) -> Array:
        return random_bits(jax.random.fold_in(key, site), x.shape[1:], spec(*names[1:]), positions)

    # One primitive, as in `dropout`.
    bits = no_hoist(jax.vmap(of_sample, in_axes=(0, None)), keys, positions)
    # Below 1, or 1 where float32 rounds the largest bits up.
    uniform = bits.astype(jnp.float32) * 2.0**-32
    return (x * (1 - distance + 2 * distance * uniform)).astype(x.dtype)
