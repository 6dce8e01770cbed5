"""Random bits of Threefry-2x32-20 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The function that `jax.random` computes for its default keys, written as plain arithmetic on each element. XLA fuses it
into the consumer of the bits; on CPUs `jax.random` instead loops over entire arrays, round by round, which takes many
times as long (benchmarks/dropout.py).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import reshard
from jaxtyping import Int, Key, UInt32

from mtjax.sharding.axes import PartitionSpec

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def random_bits(
    key: Key[Array, ""], shape: tuple[int, ...], sharding: PartitionSpec, rows: Int[Array, " rows"] | None = None
) -> UInt32[Array, "..."]:
    """Draws 32 random bits for each element, each shard on its device; they depend only on the key and the index.

    Args:
      key: a Threefry key.
      shape: at least one dimension; the last one, and the product of all before it, below 2^32.
      sharding: of the result.
      rows: indices of the first dimension's elements, where these are some of a larger array; 0, 1, ... when None.
    """
    row, column = _counters(shape, sharding, rows)
    first, second = threefry(jax.random.key_data(key), row, column)
    return first ^ second


def random_halves(
    keys: Key[Array, " batch"],
    shape: tuple[int, ...],
    sharding: PartitionSpec,
    rows: Int[Array, " rows"] | None = None,
    site: int = 0,
) -> UInt32[Array, "batch ..."]:
    """Draws a random number of 16 bits, below 2^16, for each element.

    Four neighbours in the last dimension share the two words of one counter, 20 rounds for the four.

    Args:
      keys: Threefry keys, one for each index of the first dimension.
      shape: of the result, at least two dimensions; the last one, and the product of those between, below 2^32.
      sharding: of the result.
      rows: indices of the second dimension's elements, as in `random_bits`.
      site: see `halves`.
    """
    # XLA: indices of the entire shape, with the batch. What does not depend on it would be a kernel of its own.
    row, column = _counters(shape, sharding, rows, first=1)
    words = reshard(jax.vmap(jax.random.key_data)(keys), PartitionSpec(sharding[0]))
    return jax.vmap(halves, in_axes=(0, 0, 0, None, None))(words, row, column, shape[-1], site)


def halves(
    key: UInt32[Array, "2"], row: UInt32[Array, "..."], column: UInt32[Array, "..."], length: int, site: int = 0
) -> UInt32[Array, "..."]:
    """Draws the 16 bits of elements.

    Args:
      key: the words of a Threefry key.
      row: index over all dimensions but the last.
      column: index in the last dimension.
      length: of the last dimension.
      site: changes the order of rows. Other keys give other numbers, too.
    """
    # XLA: each element computes its own counter, so that bits do not depend on the sharding. A GPU kernel's thread has
    # four neighbours, for which the compiler finds the rounds to be the same, and does them once. It sees that in an
    # index of both dimensions. XLA: what is made of one of them is computed in a kernel of its own.
    stride = -(-length // 4) * 4
    low_rows = 2**32 // stride  # of which the index fits into a word
    # XLA: it would keep indices that two sites of a layer have in common, 4 bytes an element: so they have none.
    row = row ^ jnp.uint32(site)
    index = row % jnp.uint32(low_rows) * jnp.uint32(stride) + column
    first, second = threefry(key, row // jnp.uint32(low_rows), index >> jnp.uint32(2))
    word = jnp.where(index & jnp.uint32(2) == 0, first, second)
    return jnp.where(index & jnp.uint32(1) == 0, word & jnp.uint32(0xFFFF), word >> jnp.uint32(16))


def _counters(
    shape: tuple[int, ...], sharding: PartitionSpec, rows: Int[Array, " rows"] | None, first: int = 0
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Returns each element's row-major index over the dimensions from `first` but the last, and that in the last."""

    def count(dimension: int) -> Array:
        if dimension == first and rows is not None:
            row_indices = reshard(rows.astype(jnp.uint32), PartitionSpec(sharding[first]))
            return lax.broadcast_in_dim(row_indices, shape, (first,), out_sharding=sharding)
        return lax.broadcasted_iota(jnp.uint32, shape, dimension, out_sharding=sharding)

    column = count(len(shape) - 1)
    # Zeros with the sharding of the indices.
    row = column & jnp.uint32(0)
    for dimension, size in enumerate(shape[first:-1], first):
        row = row * jnp.uint32(size) + count(dimension)
    return row, column


def threefry(
    key: UInt32[Array, "2"], first: UInt32[Array, "..."], second: UInt32[Array, "..."]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Encrypts a counter of two words: 20 rounds, with a subkey added before them and after every fourth."""
    schedule = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    first, second = first + schedule[0], second + schedule[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ ((second << jnp.uint32(distance)) | (second >> jnp.uint32(32 - distance)))
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return first, second
