"""Blocks of queries and keys, and the kernel interface of attention between them.

Forward, a kernel returns the block's normalized output and its log-sum-exp, by which outputs of several key blocks can
be merged. Backward, it receives both for the entire row, and returns the block's contribution to the gradients.
"""

from typing import NamedTuple, Protocol

from jax import Array
from jaxtyping import Float, Int, UInt32


class QueryBlock(NamedTuple):
    """Queries of some tokens, and in the backward pass the results of their entire rows of scores.

    Dimension 0 of every array is the batch and 1 the sequence, here and in `KVBlock`, so that all can be sliced alike.
    """

    query: Float[Array, "batch seq heads head_dim"]
    positions: Int[Array, "batch seq"]
    """Of the tokens in their samples."""
    segments: Int[Array, "batch seq"] | None = None
    """When given, tokens attend within their segment only."""
    first: Int[Array, "batch seq"] | None = None
    """When given, each token attends only to the tokens from this position on: the start of its sliding window, which
    ends as far after the token unless attention is causal."""
    slopes: Float[Array, "batch seq heads"] | None = None
    """When given, of ALiBi's biases, float32: those of the heads, equal in all tokens."""
    mixed: Float[Array, "batch seq heads head_dim"] | None = None
    """Output of attention: the values weighted by probabilities."""
    log_sums: Float[Array, "batch seq heads"] | None = None
    """Log-sum-exp of each row of scores, float32."""
    gradient: Float[Array, "batch seq heads head_dim"] | None = None
    """Of `mixed`."""


class KVBlock(NamedTuple):
    """Keys and values of some tokens."""

    key: Float[Array, "batch seq kv_heads head_dim"]
    value: Float[Array, "batch seq kv_heads head_dim"]
    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None = None


class DropoutState(NamedTuple):
    """Inputs of dropout on probabilities."""

    keys: UInt32[Array, "samples 2"]
    """Key data of each sample; where a batch has several blocks of each sample, samples vary fastest."""
    heads: Int[Array, " heads"]
    """Indices of the query heads in the model."""


class BlockKernel(Protocol):
    """Attention between a block of queries and a block of keys, on one device."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """Computes `mixed` and `log_sums` of the block; if `is_causal`, queries attend to keys up to their position."""
        ...

    def backward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, ...]:
        """Computes the block's contribution to the gradients of query, key and value, and perhaps more.

        `queries` have the `mixed`, `log_sums` and `gradient` of their entire rows.
        """
        ...
