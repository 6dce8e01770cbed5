"""A KV cache in 8 bits, with a scale for each token and head."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.models.kv_cache import CachePositions, KVCache

CacheType = Literal["int8", "fp8"]
TYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""Type of the stored numbers, and the largest of them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """Keys or values of sequences, as `numbers * scales`."""

    numbers: Array
    """[batch, kv_heads, length, head_dim]."""
    scales: Float[Array, "batch kv_heads length 1"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedKVCache:
    """A layer's keys and values of each sequence, in 8 bits."""

    numbers: KVCache
    scales: KVCache
    """[sequences, kv_heads, length, 1], float32."""

    @classmethod
    def empty(cls, sequences: int, kv_heads: int, length: int, head_dim: int, kind: CacheType) -> "QuantizedKVCache":
        """Builds a cache for `length` tokens of each of `sequences`; each rank has the KV heads of its query heads."""
        numbers = KVCache.empty(sequences, kv_heads, length, head_dim, TYPES[kind][0])
        return cls(numbers, KVCache.empty(sequences, kv_heads, length, 1, jnp.float32))

    @property
    def length(self) -> int:
        """Capacity of each sequence in tokens."""
        return self.numbers.length

    def extended(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        cache_positions: CachePositions,
    ) -> tuple["QuantizedKVCache", Scaled, Scaled, None]:
        """Appends new tokens; returns the cache, and their sequences' keys and values, whose positions are 0, 1, ..."""
        (key, key_scale), (value, value_scale) = (self._quantized(array) for array in (key, value))
        numbers = self.numbers.append(key, value, cache_positions)
        scales = self.scales.append(key_scale, value_scale, cache_positions)
        pairs = zip(numbers.read_by(cache_positions), scales.read_by(cache_positions), strict=True)
        keys, values = (Scaled(*pair) for pair in pairs)
        return QuantizedKVCache(numbers, scales), keys, values, None

    def resized(self, length: int) -> "QuantizedKVCache":
        """Resizes the cache to `length` tokens per sequence; later tokens are dropped."""
        return QuantizedKVCache(self.numbers.resized(length), self.scales.resized(length))

    def _quantized(self, array: Array) -> tuple[Array, Array]:
        """Returns numbers in the cache's type, and scales [batch, seq, kv_heads, 1]."""
        dtype = self.numbers.keys.dtype
        most = next(most for kind, most in TYPES.values() if kind == dtype)
        array = array.astype(jnp.float32)
        largest = jnp.abs(array).max(axis=-1, keepdims=True)
        # The quotient of zeros would be 0 / 0.
        scale = jnp.where(largest > 0, largest / most, 1.0)
        # A quotient that is rounded up would be beyond the largest 8-bit float, where it is not a number.
        numbers = jnp.clip(array / scale, -most, most)
        return (jnp.round(numbers) if dtype == jnp.int8 else numbers).astype(dtype), scale


def numbers_and_scales(array: Array | Scaled, dtype: jax.typing.DTypeLike) -> tuple[Array, Array | None]:
    """Returns keys or values as numbers of `dtype`, which has all of them exactly, and their scales [batch, kv_heads,
    length], if any."""
    if isinstance(array, Scaled):
        return array.numbers.astype(dtype), array.scales[..., 0]
    return array, None
