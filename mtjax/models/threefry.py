"""Random bits of Threefry-2x32-20 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The function that `jax.random` computes for its default keys, written as plain arithmetic on each element. XLA fuses it
into the consumer of the bits; on CPUs `jax.random` instead loops over entire arrays, round by round, which takes many
times as long (benchmarks/dropout.py).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Int, Key, UInt32

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

    def count(dimension: int) -> Array:
        if dimension == 0 and rows is not None:
            row_indices = reshard(rows.astype(jnp.uint32), PartitionSpec(sharding[0]))
            return lax.broadcast_in_dim(row_indices, shape, (0,), out_sharding=sharding)
        return lax.broadcasted_iota(jnp.uint32, shape, dimension, out_sharding=sharding)

    # The counter of an element is (row-major index over all dimensions but the last, index in the last).
    row = jnp.uint32(0)
    for dimension, size in enumerate(shape[:-1]):
        row = row * jnp.uint32(size) + count(dimension)
    first, second = threefry(jax.random.key_data(key), row, count(len(shape) - 1))
    return first ^ second


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
