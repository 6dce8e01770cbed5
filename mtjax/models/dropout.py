"""Dropout whose masks depend on the sample alone, so that they are the same on every mesh."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Int, Key

from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.recompute import DROPOUT_MASK
from mtjax.models.threefry import random_bits, random_halves
from mtjax.models.unhoisted import where
from mtjax.sharding.axes import spec
from mtjax.sharding.no_hoist import no_hoist


def dropout(
    x: Array,
    rate: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    saved_as: str = DROPOUT_MASK,
    positions: Int[Array, " seq"] | None = None,
) -> Array:
    """Zeroes a fraction `rate` of `x` and divides the remaining elements by the probability of keeping them.

    The probability is 1 - `rate`, rounded to a multiple of 2^-16. Returns `x` when `keys` is None or `rate` 0.

    Args:
      x: [batch, ...].
      rate: fraction that is dropped.
      keys: one per sample, so that what is dropped does not depend on the mesh, the microbatch size or the number of
        processes.
      site: distinguishes the dropouts that share `keys`.
      names: logical names of x's dimensions.
      saved_as: name of the mask in the policies of `mtjax.models.recompute`.
      positions: of x's second dimension in the entire sample, of which a rank may have some tokens; 0, 1, ... when
        None.
    """
    if keys is None or rate == 0:
        return x
    drawn = _halves(x, keys, site, names, positions)
    keep = checkpoint_name(drawn >= jnp.uint32(keep_threshold(rate)), saved_as)
    return where(keep, x / keep_share(rate), 0.0).astype(x.dtype)


def jitter(
    x: Array,
    distance: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    positions: Int[Array, " seq"] | None = None,
) -> Array:
    """Multiplies `x` by numbers from U(1 - `distance`, 1 + `distance`).

    Returns `x` when `keys` is None or `distance` 0. The other arguments are those of `dropout`, and the numbers too
    depend on the sample alone.
    """
    if keys is None or distance == 0:
        return x

    def of_sample(key: Array, positions: Array | None) -> Array:
        return random_bits(jax.random.fold_in(key, site), x.shape[1:], spec(*names[1:]), positions)

    bits = no_hoist(jax.vmap(of_sample, in_axes=(0, None)), keys, positions)
    uniform = bits.astype(jnp.float32) * 2.0**-32
    return (x * (1 - distance + 2 * distance * uniform)).astype(x.dtype)


def _halves(x: Array, keys: Array, site: int, names: tuple[str, ...], positions: Array | None) -> Array:
    """Draws a random number of 16 bits for each element of x, uint32 in its shape."""

    def draw(keys: Array, positions: Array | None) -> Array:
        of_site = jax.vmap(lambda key: jax.random.fold_in(key, site))(keys)
        return random_halves(of_site, x.shape, spec(*names), positions, site)

    # As one primitive: jax would hoist the elements' indices, which are constants, out of the scan over layers, and
    # every layer would read them from memory.
    return no_hoist(draw, keys, positions)
