"""Dropout whose masks depend on the sample alone, so that they are the same on every mesh."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Int, Key

from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.recompute import DROPOUT_MASK
from mtjax.sharding.axes import no_hoist, spec, where


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


def _halves(x: Array, keys: Array, site: int, names: tuple[str, ...], positions: Array | None) -> Array:
    """Draws a random number of 16 bits for each element of x, uint32 in its shape."""
    from mtjax.models.threefry import random_halves

    def draw(keys: Array, positions: Array | None) -> Array:
        of_site = jax.vmap(lambda key: jax.random.fold_in(key, site))(keys)
        return random_halves(of_site, x.shape, spec(*names), positions, site)

    # As one primitive: jax would hoist the elements' indices, which are constants, out of the scan over layers, and
    # every layer would read them from memory.
    return no_hoist(draw, keys, positions)
