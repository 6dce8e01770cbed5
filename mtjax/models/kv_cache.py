"""KV caches of attention layers for generation: keys and values of each token are computed once."""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import head_dim, latent_width, num_kv_heads
from mtjax.sharding.axes import num_shards, spec

CACHE = ("batch", "heads", "key_seq", "head_dim")
"""Logical names of a cache's dimensions: sequences, KV heads, positions, width. KV heads are sharded like query heads,
also where there are fewer of them than ranks, so that a rank has the one of its queries (`sharding.kv_heads`).
Positions are next to the width, so that a head's keys are one matrix in memory, and no product needs a transpose."""


@dataclass(frozen=True)
class CachePositions:
    """Positions of new tokens in the sequences of a cache: a chunk of one sequence (prefill), or a token of each
    (decode)."""

    positions: Int[Array, "batch seq"]
    """Of the new tokens in their sequences. In decode, positions beyond the cache's length are not written."""
    sequence: Int[Array, ""] | None = None
    """Prefill: index of the sequence of the chunk, [1, seq] with consecutive positions. Decode: None, for a token of
    each sequence, [sequences, 1]."""
    count: Int[Array, ""] | None = None
    """Prefill: tokens of the chunk before its padding."""


def in_table(positions: nnx.Param | None, ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Clips position ids to the length of a table of positions, if there is one."""
    # Padding and idle slots may have any position, and rows outside the table would read as NaN.
    return ids if positions is None else jnp.minimum(ids, len(positions[...]) - 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """A layer's keys and values of each sequence."""

    keys: Float[Array, "sequences kv_heads length head_dim"]
    values: Float[Array, "sequences kv_heads length head_dim"]

    @classmethod
    def empty(cls, sequences: int, kv_heads: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike) -> "KVCache":
        """Builds a cache for `length` tokens of each of `sequences`; each rank has the KV heads of its query heads."""
        shape = (sequences, kv_heads, length, head_dim)
        return cls(*(jnp.zeros(shape, dtype, out_sharding=spec(*CACHE)) for _ in range(2)))

    @property
    def length(self) -> int:
        """Capacity of each sequence in tokens."""
        return self.keys.shape[2]

    def append(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        cache_positions: CachePositions,
    ) -> "KVCache":
        """Writes the keys and values of new tokens; in place where the cache was donated."""
        return KVCache(_write(self.keys, key, cache_positions), _write(self.values, value, cache_positions))

    def extended(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        cache_positions: CachePositions,
    ) -> tuple["KVCache", Array, Array, None]:
        """Appends new tokens; returns the cache, and their sequences' keys and values, whose positions are 0, 1, ..."""
        cache = self.append(key, value, cache_positions)
        return cache, *cache.read_by(cache_positions), None

    def read_by(self, cache_positions: CachePositions) -> tuple[Array, Array]:
        """Returns keys and values of the sequences with new tokens, [batch, kv_heads, length, head_dim]."""
        # In decode every sequence has a new token, so no keys are copied.
        if cache_positions.sequence is None:
            return self.keys, self.values
        keys, values = (
            lax.dynamic_index_in_dim(cache, cache_positions.sequence, keepdims=True)
            for cache in (self.keys, self.values)
        )
        return keys, values

    def resized(self, length: int) -> "KVCache":
        """Resizes the cache to `length` tokens per sequence; later tokens are dropped."""
        keys, values = (resize(cache, length) for cache in (self.keys, self.values))
        return KVCache(keys, values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowKVCache:
    """A layer's keys and values of the newest tokens of each sequence: those of position p are in slot p modulo the
    number of slots, until a later position takes it."""

    keys: Float[Array, "sequences kv_heads slots head_dim"]
    values: Float[Array, "sequences kv_heads slots head_dim"]
    length: int = field(metadata={"static": True})
    """Capacity of each sequence in tokens, of which there are slots for `window` at most."""
    window: int = field(metadata={"static": True})
    """Tokens to which a token attends, itself included."""

    @classmethod
    def empty(
        cls, sequences: int, kv_heads: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike, window: int
    ) -> "WindowKVCache":
        """Builds a cache for `length` tokens of each of `sequences`; each rank has the KV heads of its query heads."""
        shape = (sequences, kv_heads, min(window, length), head_dim)
        keys, values = (jnp.zeros(shape, dtype, out_sharding=spec(*CACHE)) for _ in range(2))
        return cls(keys, values, length, window)

    @property
    def slots(self) -> int:
        """Tokens of each sequence that are kept."""
        return self.keys.shape[2]

    def extended(
        self,
        key: Float[Array, "batch seq kv_heads head_dim"],
        value: Float[Array, "batch seq kv_heads head_dim"],
        cache_positions: CachePositions,
    ) -> tuple["WindowKVCache", Array, Array, Int[Array, "batch keys"]]:
        """Writes the keys and values of new tokens.

        Returns:
          The cache; the keys and values that the new tokens may attend to, [batch, kv_heads, keys, head_dim]; and their
          positions, negative where a slot has none yet.
        """
        if cache_positions.sequence is None:
            return self._with_next(key, value, cache_positions.positions[:, 0])
        return self._with_chunk(key, value, cache_positions)

    def keeps_prefix(self, written: int, shared: int) -> bool:
        """Returns whether a sequence can be continued from its first `shared` tokens.

        Args:
          written: tokens that were written to it, one after another.
          shared: number of tokens.
        """
        # The continuation attends to the last window - 1 of the shared tokens: the first of them must have its slot.
        return written <= self.slots + max(0, shared - self.window + 1)

    def resized(self, length: int) -> "WindowKVCache":
        """Resizes the cache to `length` tokens per sequence; later tokens are dropped."""
        # Slots change only where the window is longer than the smaller of both lengths: then the positions of sequences
        # that fit are still their slots' numbers. Sequences that don't fit are not continued (`keeps_prefix`).
        slots = min(self.window, length)
        return WindowKVCache(resize(self.keys, slots), resize(self.values, slots), length, self.window)

    def _with_next(self, key: Array, value: Array, positions: Array) -> tuple["WindowKVCache", Array, Array, Array]:
        """Writes a token of each sequence, whose queries then read the cache alone."""
        # Positions beyond the cache's length are not written.
        at = jnp.where(positions < self.length, positions % self.slots, self.slots)
        keys, values = (write_rows(old, new, at) for old, new in ((self.keys, key), (self.values, value)))
        held = _held(positions[:, None], self.slots)
        return WindowKVCache(keys, values, self.length, self.window), keys, values, held

    def _with_chunk(
        self, key: Array, value: Array, cache_positions: CachePositions
    ) -> tuple["WindowKVCache", Array, Array, Array]:
        """Writes a chunk of one sequence; its queries read what the slots had before, and the chunk."""
        # The first queries of the chunk attend to tokens whose slots its last tokens take.
        positions, sequence, count = cache_positions.positions, cache_positions.sequence, cache_positions.count
        assert sequence is not None and count is not None
        offsets, slots = jnp.arange(positions.shape[1]), self.slots
        # Padding at the chunk's end must not take the slot of a token, nor may two tokens write to one slot.
        is_kept = (offsets < count) & (offsets >= count - slots)
        at = jnp.where(is_kept, positions[0] % slots, slots + offsets)
        written, read = [], []
        for old, new in ((self.keys, key), (self.values, value)):
            new = new.astype(old.dtype)
            # A scatter drops what has no slot: an update of a slice could not wrap around.
            written.append(old.at[sequence, :, at].set(new[0], mode="drop", unique_indices=True))
            before = lax.dynamic_index_in_dim(old, sequence, keepdims=True)
            read.append(jnp.concatenate([before, new.transpose(0, 2, 1, 3)], axis=2))
        held = jnp.concatenate([_held(positions[:, :1] - 1, slots), positions], axis=1)
        return WindowKVCache(written[0], written[1], self.length, self.window), read[0], read[1], held


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CrossKVCache:
    """A layer's cross-attention keys and values of the encoded text of each sequence; computed once."""

    cache: KVCache
    lengths: Int[Array, " sequences"]
    """Tokens of each text; later positions hold those of an earlier text."""

    @classmethod
    def empty(
        cls, sequences: int, kv_heads: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike
    ) -> "CrossKVCache":
        """Builds a cache for `length` tokens of each text."""
        cache = KVCache.empty(sequences, kv_heads, length, head_dim, dtype)
        return cls(cache, jnp.zeros(sequences, jnp.int32))

    @property
    def length(self) -> int:
        """Capacity of each text in tokens."""
        return self.cache.length

    def replaced(
        self,
        key: Float[Array, "1 seq kv_heads head_dim"],
        value: Float[Array, "1 seq kv_heads head_dim"],
        sequence: Int[Array, ""],
        count: Int[Array, ""],
    ) -> "CrossKVCache":
        """Replaces the text of a sequence by one of `count` tokens; later positions are padding."""
        # Written like a prefill of the sequence from position 0.
        first = jnp.zeros((1, key.shape[1]), jnp.int32)
        return CrossKVCache(
            self.cache.append(key, value, CachePositions(first, sequence)), self.lengths.at[sequence].set(count)
        )

    def read_by(self, cache_positions: CachePositions) -> tuple[Array, Array, Array]:
        """Returns keys, values and lengths [batch] of the texts of the sequences with new tokens."""
        lengths = self.lengths if cache_positions.sequence is None else self.lengths[cache_positions.sequence][None]
        return *self.cache.read_by(cache_positions), lengths

    def resized(self, length: int) -> "CrossKVCache":
        """Resizes the cache to `length` tokens per text; later tokens are dropped."""
        return CrossKVCache(self.cache.resized(length), self.lengths)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentCache:
    """A layer's latents and rotated keys of each sequence (multi-head latent attention), the same on every rank."""

    latents: Float[Array, "sequences 1 length width"]
    """The normalized latent of each token, then its rotated key; the dimension of 1 is where `KVCache` has heads."""

    @classmethod
    def empty(cls, sequences: int, length: int, width: int, dtype: jax.typing.DTypeLike) -> "LatentCache":
        """Builds a cache for `length` tokens of each of `sequences`."""
        sharding = spec("batch", None, "key_seq", None)
        return cls(jnp.zeros((sequences, 1, length, width), dtype, out_sharding=sharding))

    @property
    def length(self) -> int:
        """Capacity of each sequence in tokens."""
        return self.latents.shape[2]

    def append(self, new: Float[Array, "batch seq width"], cache_positions: CachePositions) -> "LatentCache":
        """Writes the latents of new tokens; in place where the cache was donated."""
        return LatentCache(_write(self.latents, new[:, :, None], cache_positions))

    def read_by(self, cache_positions: CachePositions) -> Float[Array, "batch length width"]:
        """Returns the latents of the sequences with new tokens."""
        if cache_positions.sequence is None:
            return self.latents[:, 0]
        return lax.dynamic_index_in_dim(self.latents[:, 0], cache_positions.sequence, keepdims=True)

    def resized(self, length: int) -> "LatentCache":
        """Resizes the cache to `length` tokens per sequence; later tokens are dropped."""
        return LatentCache(resize(self.latents, length))


def empty_caches(
    model: Model,
    sequences: int,
    length: int,
    dtype: jax.typing.DTypeLike,
    *,
    reads_encoder: bool = False,
    window: int | None = None,
    stored: Literal["int8", "fp8"] | None = None,
) -> dict[str, Any]:
    """Builds the caches of a layer's mixers, by their names: "attention", and "cross" with `reads_encoder`; `window` is
    the layer's, if it has one that is shorter than the longest sequence; `stored` is an 8-bit type, if any."""
    if width := latent_width(model):
        return {"attention": LatentCache.empty(sequences, length, width, dtype)}
    # With fewer key-value heads than tensor parallel ranks, heads are repeated so that each rank has one.
    sizes = (sequences, max(num_kv_heads(model), num_shards("heads")), length, head_dim(model), dtype)
    if window is not None:
        return {"attention": WindowKVCache.empty(*sizes, window)}
    if stored is not None:
        from mtjax.models.quantized_cache import QuantizedKVCache

        return {"attention": QuantizedKVCache.empty(*sizes[:-1], stored)}
    return {"attention": KVCache.empty(*sizes), **({"cross": CrossKVCache.empty(*sizes)} if reads_encoder else {})}


def _write(cache: Array, new: Array, cache_positions: CachePositions) -> Array:
    """Writes new tokens [batch, seq, kv_heads, head_dim] into a cache [sequences, kv_heads, length, head_dim]."""
    new = new.astype(cache.dtype)
    # Prefill: consecutive positions of one sequence are a slice. Decode: one position of each sequence is a scatter.
    if cache_positions.sequence is not None:
        block = new.transpose(0, 2, 1, 3)
        return lax.dynamic_update_slice(cache, block, (cache_positions.sequence, 0, cache_positions.positions[0, 0], 0))
    return write_rows(cache, new, cache_positions.positions[:, 0])


def write_rows(cache: Array, new: Array, at: Array) -> Array:
    """Writes a token of each sequence, [sequences, 1, kv_heads, head_dim], at positions [sequences]; those beyond the
    cache are dropped."""
    rows, new = jnp.arange(cache.shape[0]), new.astype(cache.dtype)[:, 0]
    if cache.shape[0] == 1:
        # XLA: a scatter of a single row becomes an update that copies the cache. The second row is dropped.
        nowhere = jnp.full_like(at, cache.shape[2])
        rows, at, new = jnp.tile(rows, 2), jnp.concatenate([at, nowhere]), jnp.concatenate([new, new])
    return cache.at[rows, :, at].set(new, mode="drop", unique_indices=True)


def resize(cache: Array, length: int) -> Array:
    """Truncates or pads a cache [sequences, kv_heads, length, head_dim] to `length`."""
    if length <= cache.shape[2]:
        return cache[:, :, :length]
    return jnp.pad(cache, ((0, 0), (0, 0), (0, length - cache.shape[2]), (0, 0)))


def _held(newest: Int[Array, "batch 1"], slots: int) -> Int[Array, "batch slots"]:
    """Returns the position that each slot holds when `newest` is the last one; negative where it holds none."""
    # The largest position up to the newest that is congruent to the slot.
    return newest - (newest - jnp.arange(slots)) % slots
