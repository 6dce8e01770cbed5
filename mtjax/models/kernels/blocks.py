"""Attention where ranks share the tokens of a sample: XLA's and cuDNN's kernels for a block of queries and keys."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from mtjax.models.dropout import keep_threshold
from mtjax.models.layer_context import LayerContext
from mtjax.models.recompute import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.models.threefry import threefry
from mtjax.sharding.axes import num_shards, varying_like
from mtjax.sharding.context.attention import context_attention
from mtjax.sharding.context.block_attention import NEVER, BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.flash import residual_index
from mtjax.theory.parts.attention import QUERIES_AT_A_TIME

Attend = Callable[..., Array]
"""(query, key, value, scale=, is_causal=) -> the mixed values."""

cudnn: Attend = partial(jax.nn.dot_product_attention, implementation="cudnn")
"""cuDNN's attention, in 16 bits, on one GPU."""


def attend_across(
    kernel: Literal["xla", "cudnn"],
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    context: LayerContext,
    rate: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Self-attention to the tokens of all ranks that share the samples; `rate` is that of dropout."""
    assert context.bias is None and context.positions is not None
    scale = query.shape[-1] ** -0.5 if context.scale is None else context.scale
    drops = None
    if rate and context.dropout_keys is not None:
        own = jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(key, 0)))(context.dropout_keys)
        drops = DropoutState(own, jnp.arange(query.shape[2]))
    length = query.shape[1] * num_shards("seq")
    blocks: BlockKernel = XlaBlocks(scale, rate, length) if kernel == "xla" else CudnnBlocks(scale)
    names = (ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    queries = QueryBlock(query, context.positions, context.segment_ids)
    return context_attention(blocks, context.context_method, context.is_causal, queries, key, value, drops, names)


@dataclass(frozen=True)
class XlaBlocks:
    """XLA's, on any device: masks, segments and dropout; scores of a few queries at a time."""

    scale: float
    """Of the scores."""
    rate: float = 0.0
    """Of the dropout on probabilities."""
    length: int = 0
    """Tokens of a sample, by which dropout counts."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """See `BlockKernel`."""

        def some(_: None, part: QueryBlock) -> tuple[None, tuple[Array, Array]]:
            scores, kept = self._scores(part, keys, drops, is_causal)
            log_sums = jax.nn.logsumexp(scores, axis=-1)
            shares = (jnp.exp(scores - log_sums[..., None]) * kept).astype(keys.value.dtype)
            mixed = jnp.einsum("bgmqk,bkgd->bqgmd", shares, keys.value).reshape(part.query.shape)
            return None, (mixed, log_sums.reshape(log_sums.shape[0], -1, log_sums.shape[-1]).swapaxes(1, 2))

        return _in_parts(some, None, queries)[1]

    def backward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel`; gradients of keys and values are float32."""
        grouped = partial(_grouped, groups=keys.key.shape[2])
        wide = partial(jnp.einsum, preferred_element_type=jnp.float32)

        def some(sums: tuple[Array, Array], part: QueryBlock) -> tuple[tuple[Array, Array], Array]:
            assert part.mixed is not None and part.log_sums is not None and part.gradient is not None
            scores, kept = self._scores(part, keys, drops, is_causal)
            shares = jnp.exp(scores - grouped(part.log_sums).transpose(0, 2, 3, 1)[..., None])
            gradient = grouped(part.gradient)
            own = (grouped(part.mixed).astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
            of_shares = wide("bqgmd,bkgd->bgmqk", gradient, keys.value) * kept
            of_scores = shares * (of_shares - own.transpose(0, 2, 3, 1)[..., None]) * self.scale
            of_scores = of_scores.astype(keys.key.dtype)
            of_keys = wide("bgmqk,bqgmd->bkgd", of_scores, grouped(part.query))
            of_values = wide("bgmqk,bqgmd->bkgd", (shares * kept).astype(gradient.dtype), gradient)
            of_queries = jnp.einsum("bgmqk,bkgd->bqgmd", of_scores, keys.key).reshape(part.query.shape)
            return (sums[0] + of_keys, sums[1] + of_values), of_queries

        zeros = varying_like(jnp.zeros(keys.key.shape, jnp.float32), *jax.tree.leaves((queries, keys, drops)))
        (of_keys, of_values), of_queries = _in_parts(some, (zeros, zeros), queries)
        return of_queries, of_keys, of_values

    def _scores(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Any]:
        """float32 scores [batch, groups, heads / groups, seq, key_seq], and by what dropout multiplies probabilities:
        nothing but 0 or 1 / (1 - rate)."""
        query = _grouped(queries.query * self.scale, keys.key.shape[2])
        scores = jnp.einsum("bqgmd,bkgd->bgmqk", query, keys.key, preferred_element_type=jnp.float32)
        seen = queries.positions[:, :, None] >= keys.positions[:, None, :] if is_causal else None
        if queries.segments is not None and keys.segments is not None:
            same = queries.segments[:, :, None] == keys.segments[:, None, :]
            seen = same if seen is None else seen & same
        if seen is not None:
            scores = jnp.where(seen[:, None, None], scores, NEVER)
        if drops is None:
            return scores, 1.0
        return scores, self._kept(queries, keys, drops).reshape(scores.shape)

    def _kept(self, queries: QueryBlock, keys: KVBlock, drops: DropoutState) -> Array:
        """[batch, heads, seq, key_seq]; by the bits that `random_bits` has for all heads, queries and keys of a sample,
        at the places of these."""
        rows = drops.heads[:, None].astype(jnp.uint32) * np.uint32(self.length)
        rows = rows + queries.positions[:, None].astype(jnp.uint32)
        columns = keys.positions[:, None, None].astype(jnp.uint32)

        def bits(key: Array, rows: Array, columns: Array) -> Array:
            first, second = threefry(key, rows[:, :, None], columns)
            return first ^ second

        copies = queries.query.shape[0] // drops.keys.shape[0]
        drawn = jax.vmap(bits)(jnp.tile(drops.keys, (copies, 1)), rows, columns)
        return (drawn >= keep_threshold(self.rate)) / np.float32(1 - self.rate)


def _grouped(a: Array, groups: int) -> Array:
    """[batch, seq, heads, ...] by groups of heads that share a key: [batch, seq, groups, heads / groups, ...]."""
    return a.reshape(*a.shape[:2], groups, -1, *a.shape[3:])


def _in_parts(some: Callable[[Any, QueryBlock], tuple[Any, Any]], carry: Any, queries: QueryBlock) -> tuple[Any, Any]:
    """`some` of a few queries after the other, as `lax.scan` calls it; what it returns of them joined again."""
    length = queries.query.shape[1]
    parts = next(n for n in range(-(-length // QUERIES_AT_A_TIME), length + 1) if length % n == 0)
    if parts == 1:
        return some(carry, queries)
    split = jax.tree.map(lambda a: a.reshape(a.shape[0], parts, -1, *a.shape[2:]).swapaxes(0, 1), queries)
    carry, results = lax.scan(some, carry, split)
    return carry, jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(a.shape[1], length, *a.shape[3:]), results)


@dataclass(frozen=True)
class CudnnBlocks:
    """cuDNN's, in 16 bits on GPUs: no segments and no dropout (`mtjax.theory.attention`)."""

    scale: float
    """Of the scores."""
    attend: Attend = cudnn
    """The kernel for whole rows, whose derivative saves what cuDNN's does."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """See `BlockKernel`.

        Log-sums in float32 are among what the kernel saves for its backward pass; `return_residual=True` would round
        them to 16 bits.
        """
        assert drops is None and queries.segments is None
        inputs = (queries.query, keys.key, keys.value)
        mixed, pull = jax.vjp(partial(self.attend, scale=self.scale, is_causal=is_causal), *inputs)
        leaves = jax.tree.leaves(pull)
        return mixed, leaves[residual_index(leaves, (*inputs, mixed))].swapaxes(1, 2)

    def backward(
        self, queries: QueryBlock, keys: KVBlock, drops: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel`: the kernel's own derivative, with the entire row's output and log-sums in the place of the
        block's. Nobody reads those then, so that the block's forward kernel is not compiled."""
        assert drops is None and queries.log_sums is not None
        inputs = (queries.query, keys.key, keys.value)
        again, pull = jax.vjp(partial(self.attend, scale=self.scale, is_causal=is_causal), *inputs)
        leaves, tree = jax.tree.flatten(pull)
        leaves[residual_index(leaves, (*inputs, again))] = queries.log_sums.swapaxes(1, 2)
        return jax.tree.unflatten(tree, [queries.mixed if leaf is again else leaf for leaf in leaves])(queries.gradient)
