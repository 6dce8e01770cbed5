"""Kernels of attention for a block of queries and a block of keys, XLA's and cuDNN's, and context parallel attention by
them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard
from jaxtyping import Bool, Float

from mtjax.layout.attention_kernel import HIDDEN_SCORE, QUERIES_AT_A_TIME
from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.alibi import Alibi
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.saved_names import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.models.threefry import halves
from mtjax.sharding.axes import num_shards, spec, varying_like
from mtjax.sharding.context.attention import context_attention
from mtjax.sharding.context.block_attention import BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.flash import statistics_of, with_saved

Attend = Callable[..., Array]
"""(query, key, value, scale=, is_causal=) -> output."""

cudnn: Attend = partial(jax.nn.dot_product_attention, implementation="cudnn")
"""cuDNN's attention, in 16 bits, on one GPU."""


def attend_across(
    kernel: Literal["xla", "cudnn"],
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes self-attention to the tokens of all context parallel ranks."""
    assert context.bias is None and context.positions is not None
    scale = options.scale_of(query.shape[-1])
    dropout = dropout_of(query, context, options)
    length = query.shape[1] * num_shards("seq")
    blocks: BlockKernel = (
        XlaBlocks(scale, options.dropout_rate, length, options.softcap, options.alibi)
        if kernel == "xla"
        else CudnnBlocks(scale)
    )
    names = (ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    # The position of the first key, not a distance: on a rank the tokens of a sample are not consecutive.
    first = None if options.window is None else context.positions - (options.window - 1)
    queries = QueryBlock(query, context.positions, context.segment_ids, first)
    if options.alibi is not None:
        queries = queries._replace(slopes=options.alibi.by_head())
    method, is_causal = context.context_method, context.is_causal
    return context_attention(blocks, method, is_causal, queries, key, value, dropout, names, options.sinks)


def dropout_of(
    query: Float[Array, "batch seq heads head_dim"], context: LayerContext, options: AttentionOptions
) -> DropoutState | None:
    """Returns what dropout's masks are computed from, with the keys and element indices of `xla.softmax_attention`, so
    that they are equal with every kernel and on every mesh; None without dropout."""
    if not options.dropout_rate or context.dropout_keys is None:
        return None
    # The site of probabilities is 0, as in `xla.softmax_attention`.
    keys = jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(key, 0)))(context.dropout_keys)
    return DropoutState(keys, reshard(jnp.arange(query.shape[2]), spec("heads")))


@dataclass(frozen=True)
class XlaBlocks:
    """XLA's kernel, for any device: masks, segments and dropout; scores of a few queries at a time."""

    scale: float
    """Of the scores."""
    rate: float = 0.0
    """Of the dropout on probabilities."""
    length: int = 0
    """Tokens of a sample, from which the indices of dropout's random bits are computed."""
    softcap: float | None = None
    """When given, the cap of scores."""
    alibi: Alibi | None = None
    """When given, biases are added to the scores, with the slopes of the queries' heads."""
    at_a_time: int | None = None
    """Queries whose scores are alive together; `QUERIES_AT_A_TIME` when None."""
    observes: bool = False
    """Whether `backward` also returns each row's largest score, before cap and bias; of its block of keys alone."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """See `BlockKernel.forward`."""

        # einsum letters: b batch, q queries, k keys, g KV heads, m query heads of one, d head_dim
        def one(_: None, chunk: QueryBlock) -> tuple[None, tuple[Array, Array]]:
            """Attends from a chunk of queries to all keys: the output and log-sums."""
            # The log-sums are those before dropout, which multiplies normalized probabilities: blocks of keys merge by
            # them.
            scores, _, factors = self._scores(chunk, keys, dropout, is_causal)[:3]
            log_sums = jax.nn.logsumexp(scores, axis=-1)
            probabilities = (jnp.exp(scores - log_sums[..., None]) * factors).astype(keys.value.dtype)
            mixed = _by_token(jnp.einsum("bgmqk,bkgd->bgmqd", probabilities, keys.value))
            return None, (mixed, log_sums.reshape(log_sums.shape[0], -1, log_sums.shape[-1]).swapaxes(1, 2))

        return _scan_queries(one, None, queries, self.at_a_time)[1]

    def backward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, ...]:
        """See `BlockKernel.backward`; gradients of keys and values are float32. If it `observes`, the largest scores of
        rows are a fourth array, [batch, seq, heads]."""
        grouped = partial(_grouped, kv_heads=keys.key.shape[2])
        einsum_float32 = partial(jnp.einsum, preferred_element_type=jnp.float32)

        # With S = Q K' scale, P = exp(S - log_sums), D dropout's factors, O = (P D) V and dO its gradient:
        # dP = (dO V') D, dS = P (dP - rowsum(dO O)), dQ = dS K scale, dK = dS' Q scale, dV = (P D)' dO.
        def one(sums: tuple[Array, Array], chunk: QueryBlock) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
            """Differentiates a chunk of queries; gradients of keys and values accumulate in the carry."""
            assert chunk.mixed is not None and chunk.log_sums is not None and chunk.gradient is not None
            scores, derivative, factors, largest = self._scores(chunk, keys, dropout, is_causal, self.observes)
            probabilities = jnp.exp(scores - grouped(chunk.log_sums).transpose(0, 2, 3, 1)[..., None])
            mixed, gradient, query = (_by_head(grouped(a)) for a in (chunk.mixed, chunk.gradient, chunk.query))
            # Sums over all keys of a row, of which this block has some: `mixed` and `gradient` are those of all keys.
            row_sums = (mixed.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
            d_probabilities = einsum_float32("bgmqd,bkgd->bgmqk", gradient, keys.value) * factors
            d_scores = probabilities * (d_probabilities - row_sums[..., None]) * self.scale
            d_scores = (d_scores * derivative).astype(keys.key.dtype)
            d_key = einsum_float32("bgmqk,bgmqd->bkgd", d_scores, query)
            d_value = einsum_float32("bgmqk,bgmqd->bkgd", (probabilities * factors).astype(gradient.dtype), gradient)
            d_query = _by_token(jnp.einsum("bgmqk,bkgd->bgmqd", d_scores, keys.key))
            of_rows = () if largest is None else (largest.reshape(len(largest), -1, largest.shape[-1]).swapaxes(1, 2),)
            return (sums[0] + d_key, sums[1] + d_value), (d_query, *of_rows)

        arrays = jax.tree.leaves((queries, keys, dropout))
        zeros = [varying_like(jnp.zeros(a.shape, jnp.float32), *arrays) for a in (keys.key, keys.value)]
        (d_key, d_value), (d_query, *largest) = _scan_queries(one, tuple(zeros), queries, self.at_a_time)
        return d_query, d_key, d_value, *largest

    def _scores(
        self,
        queries: QueryBlock,
        keys: KVBlock,
        dropout: DropoutState | None,
        is_causal: bool,
        observes: bool = False,
    ) -> tuple[Array, Any, Any, Array | None]:
        """Computes masked scores, the derivative of their cap, and the factors 0 or 1 / `keep_share` by which dropout
        multiplies probabilities.

        Returns:
          float32 [batch, kv_heads, heads / kv_heads, seq, key_seq] each; 1.0 without a cap, and without dropout. If it
          observes, then the largest score of each row, [batch, kv_heads, heads / kv_heads, seq], else None.
        """
        # XLA: products have einsum's natural order of dimensions: any other would transpose an array of scores.
        query = _by_head(_grouped(queries.query * self.scale, keys.key.shape[2]))
        scores = jnp.einsum("bgmqd,bkgd->bgmqk", query, keys.key, preferred_element_type=jnp.float32)
        products, derivative = scores, 1.0
        if self.softcap is not None:
            tanh = jnp.tanh(scores / self.softcap)
            scores, derivative = self.softcap * tanh, 1 - jnp.square(tanh)
        if self.alibi is not None and queries.slopes is not None:
            slopes = _grouped(queries.slopes, keys.key.shape[2]).transpose(0, 2, 3, 1)[..., None]
            of_queries = self.alibi.at(queries.positions[:, None, None, :, None], slopes)
            scores += self.alibi.at(keys.positions[:, None, None, None, :], slopes) - of_queries
        seen = _seen(queries, keys, is_causal)
        largest = _hidden(products, seen).max(-1) if observes else None
        scores = _hidden(scores, seen)
        if dropout is None:
            return scores, derivative, 1.0, largest
        return scores, derivative, self._dropout_factors(queries, keys, dropout).reshape(scores.shape), largest

    def _dropout_factors(self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState) -> Array:
        """Computes the factors, float32 [batch, heads, seq, key_seq], by the positions of queries and keys."""
        # The bits are those of `random_halves` for all heads, queries and keys of a sample, so that the mask does not
        # depend on the context parallel degree.
        rows = dropout.heads[:, None].astype(jnp.uint32) * np.uint32(self.length)
        rows = rows + queries.positions[:, None].astype(jnp.uint32)
        columns = keys.positions[:, None, None].astype(jnp.uint32)

        def bits(key: Array, rows: Array, columns: Array) -> Array:
            return halves(key, rows[:, :, None], columns, self.length)

        # Ring attention computes two pairs of chunks of each sample in one batch.
        copies = queries.query.shape[0] // dropout.keys.shape[0]
        drawn = jax.vmap(bits)(jnp.tile(dropout.keys, (copies, 1)), rows, columns)
        return (drawn >= jnp.uint32(keep_threshold(self.rate))) / np.float32(keep_share(self.rate))


def _seen(queries: QueryBlock, keys: KVBlock, is_causal: bool) -> Bool[Array, "batch seq key_seq"] | None:
    """Returns where a query attends to a key; None for everywhere."""
    # Compares positions, not indices: a rank's tokens are two chunks of a sample, and keys may be another rank's.
    seen = queries.positions[:, :, None] >= keys.positions[:, None, :] if is_causal else None
    if queries.segments is not None and keys.segments is not None:
        same = queries.segments[:, :, None] == keys.segments[:, None, :]
        seen = same if seen is None else seen & same
    if queries.first is not None:
        near = keys.positions[:, None, :] >= queries.first[:, :, None]
        if not is_causal:
            # As far after the token as `first` is before it.
            last = 2 * queries.positions - queries.first
            near &= keys.positions[:, None, :] <= last[:, :, None]
        seen = near if seen is None else seen & near
    return seen


def _hidden(scores: Array, seen: Bool[Array, "batch seq key_seq"] | None) -> Array:
    """Replaces scores of keys that a query does not attend to by `HIDDEN_SCORE`."""
    return scores if seen is None else jnp.where(seen[:, None, None], scores, HIDDEN_SCORE)


def _grouped(a: Array, kv_heads: int) -> Array:
    """Groups heads that share a key: [batch, seq, heads, ...] -> [batch, seq, kv_heads, heads / kv_heads, ...]."""
    return a.reshape(*a.shape[:2], kv_heads, -1, *a.shape[3:])


def _by_head(a: Array) -> Array:
    """[batch, seq, kv_heads, heads / kv_heads, width] -> [batch, kv_heads, heads / kv_heads, seq, width]."""
    return a.transpose(0, 2, 3, 1, 4)


def _by_token(a: Array) -> Array:
    """[batch, kv_heads, heads / kv_heads, seq, width] -> [batch, seq, heads, width]."""
    return a.transpose(0, 3, 1, 2, 4).reshape(a.shape[0], a.shape[3], -1, a.shape[4])


def _scan_queries(
    one: Callable[[Any, QueryBlock], tuple[Any, Any]], carry: Any, queries: QueryBlock, at_a_time: int | None = None
) -> tuple[Any, Any]:
    """Scans over chunks of queries, so that scores of one chunk are alive at a time.

    Args:
      one: (carry, chunk) -> (carry, arrays [batch, chunk, ...]).
      carry: of the first chunk.
      queries: [batch, seq, ...].
      at_a_time: the most queries of a chunk; `QUERIES_AT_A_TIME` when None.

    Returns:
      The carry, and the arrays concatenated, [batch, seq, ...].
    """
    length = queries.query.shape[1]
    # The fewest chunks that divide the length and have no more queries than allowed.
    count = next(n for n in range(-(-length // (at_a_time or QUERIES_AT_A_TIME)), length + 1) if length % n == 0)
    if count == 1:
        return one(carry, queries)
    chunks = jax.tree.map(lambda a: a.reshape(a.shape[0], count, -1, *a.shape[2:]).swapaxes(0, 1), queries)
    carry, results = lax.scan(one, carry, chunks)
    return carry, jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(a.shape[1], length, *a.shape[3:]), results)


@dataclass(frozen=True)
class CudnnBlocks:
    """cuDNN's kernel, in 16 bits on GPUs: no segments and no dropout (`mtjax.layout.attention_kernel`)."""

    scale: float
    """Of the scores."""
    attend: Attend = cudnn
    """The kernel for entire rows; its residuals are those of cuDNN's."""

    def forward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array]:
        """See `BlockKernel.forward`."""
        # The log-sums are the kernel's residual in float32; `return_residual=True` would round them to 16 bits.
        assert dropout is None and queries.segments is None
        inputs = (queries.query, keys.key, keys.value)
        mixed, vjp = jax.vjp(partial(self.attend, scale=self.scale, is_causal=is_causal), *inputs)
        return mixed, statistics_of(vjp, (*inputs, mixed)).swapaxes(1, 2)

    def backward(
        self, queries: QueryBlock, keys: KVBlock, dropout: DropoutState | None, is_causal: bool
    ) -> tuple[Array, Array, Array]:
        """See `BlockKernel.backward`."""
        # The kernel's vjp function, with the entire row's output and log-sums in place of the block's. Nothing reads
        # the block's then, so its forward kernel is not compiled.
        assert dropout is None and queries.log_sums is not None and queries.mixed is not None
        inputs = (queries.query, keys.key, keys.value)
        recomputed, vjp = jax.vjp(partial(self.attend, scale=self.scale, is_causal=is_causal), *inputs)
        again, log_sums = statistics_of(vjp, (*inputs, recomputed)), queries.log_sums.swapaxes(1, 2)
        return with_saved(vjp, (recomputed, queries.mixed), (again, log_sums))(queries.gradient)
