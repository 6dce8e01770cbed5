"""Divides the tokens of a rank, whose logits would not all fit into memory at once."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class TokenChunks:
    """Divides a rank's `tokens` into `count` chunks of equal length, the last one padded with zeros."""

    tokens: int
    count: int

    @classmethod
    def of(cls, hidden_BSH: Array, size: int) -> "TokenChunks":
        """Divides the tokens of an array [B, S, ...] into chunks of at most `size`."""
        tokens = hidden_BSH.shape[0] * hidden_BSH.shape[1]
        return cls(tokens, -(-tokens // size))

    @property
    def length(self) -> int:
        """Tokens of a chunk."""
        # As few as make `count` chunks, so that the last one has little padding.
        return -(-self.tokens // self.count)

    def split(self, a: Array) -> Array:
        """[B, S, ...] -> [chunks, C, ...]."""
        flat = a.reshape(self.tokens, *a.shape[2:])
        if padding := self.count * self.length - self.tokens:
            # `join` cuts off the losses of the padding; in the backward pass its gradients are 0.
            flat = jnp.pad(flat, [(0, padding)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(self.count, self.length, *a.shape[2:])

    def join(self, a: Array, shape: tuple[int, ...]) -> Array:
        """[chunks, C, ...] -> [B, S, ...], without the padding."""
        return a.reshape(-1, *a.shape[2:])[: self.tokens].reshape(shape)
