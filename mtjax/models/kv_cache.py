"""A cache of keys and values, so that those of each token are computed once; the state of attention layers."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.sharding.axes import spec

CACHE = ("batch", "heads", "key_seq", "head_dim")
"""Sequences, groups of query heads, positions, width. Positions are next to the width: a head's keys are one matrix in
memory, and no product has to turn them around."""


@dataclass(frozen=True)
class CachePositions:
    """Where new tokens stand among the sequences of a cache.

    Either a chunk of one sequence, or one token of each.
    """

    positions: Int[Array, "batch seq"]
    """Of the new tokens in their sequences. What is beyond the cache's length is not written; of a chunk, all is."""
    sequence: Int[Array, ""] | None = None
    """That a chunk, [1, seq] with positions in a row, continues; None for a token of each, [sequences, 1]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """A layer's cache: what attention remembers of each sequence."""

    keys: Float[Array, "sequences groups length head_dim"]
    values: Float[Array, "sequences groups length head_dim"]

    @classmethod
    def empty(cls, sequences: int, groups: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike) -> "KVCache":
        """Room for `length` tokens of each of `sequences`; each rank has the groups of its own query heads."""
        shape = (sequences, groups, length, head_dim)
        return cls(*(jnp.zeros(shape, dtype, out_sharding=spec(*CACHE)) for _ in range(2)))

    @property
    def length(self) -> int:
        """Tokens for which each sequence has room."""
        return self.keys.shape[2]

    def append(
        self,
        key: Float[Array, "batch seq groups head_dim"],
        value: Float[Array, "batch seq groups head_dim"],
        reading: CachePositions,
    ) -> "KVCache":
        """With the keys and values of new tokens; written in place where the cache was donated."""
        return KVCache(_written(self.keys, key, reading), _written(self.values, value, reading))

    def read_by(self, reading: CachePositions) -> tuple[Array, Array]:
        """Keys and values of the sequences that are continued, [batch, groups, length, head_dim]."""
        if reading.sequence is None:
            return self.keys, self.values
        keys, values = (
            lax.dynamic_index_in_dim(kept, reading.sequence, keepdims=True) for kept in (self.keys, self.values)
        )
        return keys, values

    def resized(self, length: int) -> "KVCache":
        """With room for `length` tokens; what is beyond is lost."""
        keys, values = (_resized(kept, length) for kept in (self.keys, self.values))
        return KVCache(keys, values)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CrossKVCache:
    """What a layer's cross-attention remembers of the text that each sequence answers; computed once."""

    kept: KVCache
    lengths: Int[Array, " sequences"]
    """Tokens of each text; what lies behind is of an earlier one."""

    @classmethod
    def empty(
        cls, sequences: int, groups: int, length: int, head_dim: int, dtype: jax.typing.DTypeLike
    ) -> "CrossKVCache":
        """Room for `length` tokens of each text."""
        kept = KVCache.empty(sequences, groups, length, head_dim, dtype)
        return cls(kept, jnp.zeros(sequences, jnp.int32))

    @property
    def length(self) -> int:
        """Tokens for which each text has room."""
        return self.kept.length

    def replaced(
        self,
        key: Float[Array, "1 seq groups head_dim"],
        value: Float[Array, "1 seq groups head_dim"],
        sequence: Int[Array, ""],
        count: Int[Array, ""],
    ) -> "CrossKVCache":
        """With another text for a sequence, of which `count` tokens are not filling."""
        first = jnp.zeros((1, key.shape[1]), jnp.int32)
        return CrossKVCache(
            self.kept.append(key, value, CachePositions(first, sequence)), self.lengths.at[sequence].set(count)
        )

    def read_by(self, reading: CachePositions) -> tuple[Array, Array, Array]:
        """Keys, values and lengths [batch] of the texts that the continued sequences answer."""
        lengths = self.lengths if reading.sequence is None else self.lengths[reading.sequence][None]
        return *self.kept.read_by(reading), lengths

    def resized(self, length: int) -> "CrossKVCache":
        """With room for `length` tokens; what is beyond is lost."""
        return CrossKVCache(self.kept.resized(length), self.lengths)


def _written(kept: Array, new: Array, reading: CachePositions) -> Array:
    new = new.astype(kept.dtype)
    if reading.sequence is not None:
        block = new.transpose(0, 2, 1, 3)
        return lax.dynamic_update_slice(kept, block, (reading.sequence, 0, reading.positions[0, 0], 0))
    rows, at, new = jnp.arange(kept.shape[0]), reading.positions[:, 0], new[:, 0]
    if kept.shape[0] == 1:  # of a single row XLA makes an update that copies the cache: the second one is dropped
        nowhere = jnp.full_like(at, kept.shape[2])
        rows, at, new = jnp.tile(rows, 2), jnp.concatenate([at, nowhere]), jnp.concatenate([new, new])
    return kept.at[rows, :, at].set(new, mode="drop", unique_indices=True)


def _resized(kept: Array, length: int) -> Array:
    if length <= kept.shape[2]:
        return kept[:, :, :length]
    return jnp.pad(kept, ((0, 0), (0, 0), (0, length - kept.shape[2]), (0, 0)))
