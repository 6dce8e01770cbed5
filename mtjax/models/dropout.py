"""Dropout whose masks depend on the sample alone."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Int, Key

from mtjax.models.recompute import DROPOUT_MASK
from mtjax.models.threefry import random_bits
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
    places: Int[Array, " seq"] | None = None,
) -> Array:
    """Zeroes a share `rate` of `x` and scales up the rest; nothing when `keys` is None or `rate` 0.

    Args:
      x: [batch, ...].
      rate: share that is dropped.
      keys: one per sample, so that what is dropped does not depend on the mesh, the microbatch size or the number of
        processes.
      site: distinguishes the dropouts that share `keys`.
      names: logical names of x's dimensions.
      saved_as: name by which `mtjax.models.recompute` knows the mask.
      places: of x's second dimension in the whole sample, of which a rank may have some tokens; 0, 1, ... when None.
    """
    if keys is None or rate == 0:
        return x
    keep = checkpoint_name(_bits(x, keys, site, names, places) >= keep_threshold(rate), saved_as)
    return where(keep, x / (1 - rate), 0.0).astype(x.dtype)


def jitter(
    x: Array,
    distance: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    places: Int[Array, " seq"] | None = None,
) -> Array:
    """`x` times numbers drawn evenly within `distance` of 1; `x` itself when `keys` is None or `distance` 0.

    The other arguments are as `dropout`'s, and so is what it depends on.
    """
    if keys is None or distance == 0:
        return x
    even = _bits(x, keys, site, names, places).astype(jnp.float32) * 2.0**-32
    return (x * (1 - distance + 2 * distance * even)).astype(x.dtype)


def _bits(x: Array, keys: Array, site: int, names: tuple[str, ...], places: Array | None) -> Array:
    """32 random bits for each element of x. In one piece: jax would lift the elements' numbers out of the loop over
    layers, and every layer would read them from memory."""

    def of_sample(key: Array, places: Array | None) -> Array:
        return random_bits(jax.random.fold_in(key, site), x.shape[1:], spec(*names[1:]), places)

    return no_hoist(jax.vmap(of_sample, in_axes=(0, None)), keys, places)


def keep_threshold(rate: float) -> Array:
    """The least of 32 random bits, as a number, with which an element is kept."""
    return jnp.uint32(min(round(rate * 2**32), 2**32 - 1))
