"""What attention across ranks is made of: blocks of queries and keys, and the kernel that a caller hands over.

Forward, a kernel gives a block's own normalised output and the logarithm of its softmax's denominator, by which blocks
can be merged. Backward, it is given both for the entire row and gives what this block adds to the gradients.
"""

from typing import NamedTuple, Protocol

from jax import Array
from jaxtyping import Float, Int, UInt32

NEVER = -1e30
"""Score of a key that a query does not see, and log-sum of a row without any: its exponential is 0."""


class QueryBlock(NamedTuple):
    """Queries of some tokens, and what a backward pass knows of the entire rows of their scores.

    Dimension 0 of every array is the batch and 1 the sequence, here and in `Keys`: all are cut and joined alike.
    """

    query: Float[Array, "batch seq heads head_dim"]
    positions: Int[Array, "batch seq"]
    """Of the tokens in their samples."""
    segments: Int[Array, "batch seq"] | None = None
    """When given, tokens see those of their own segment only."""
    mixed: Float[Array, "batch seq heads head_dim"] | None = None
    log_sums: Float[Array, "batch seq heads"] | None = None
    """Logarithms of the sums of the exponentials of a row's scores, float32."""
    gradient: Float[Array, "batch seq heads head_dim"] | None = None
    """Of `mixed`."""


class KVBlock(NamedTuple):
    """Keys and values of some tokens."""

    key: Float[Array, "batch seq groups head_dim"]
    value: Float[Array, "batch seq groups head_dim"]
    positions: Int[Array, "batch seq"]
    segments: Int[Array, "batch seq"] | None = None


class DropoutState(NamedTuple):
    """What dropout on probabilities derives from."""

    keys: UInt32[Array, "samples 2"]
    """The samples' own, as data; where a batch has several blocks of each sample, samples vary fastest."""
    heads: Int[Array, " heads"]
    """Numbers, in the model, of the heads of queries."""


class BlockKernel(Protocol):
    """Attention between a block of queries and a block of keys, on one device."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """`mixed` and `log_sums` of the block; where `is_causal`, queries see keys up to their own place only."""
        ...

    def backward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array, Array]:
        """What the block adds to the gradients of queries, keys and values, given the entire row's `mixed`,
        `log_sums` and `gradient`."""
        ...
