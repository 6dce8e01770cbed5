"""Vocabulary-parallel sampling: the next token of each row, sampled from logits that stay sharded.

Each tensor parallel rank computes the logits of its columns of the vocabulary, as in `mtjax.sharding.vocab`, and never
gathers them. The collectives carry a few numbers for each row: a maximum and its column, sums of probabilities, counts.
The thresholds of top-k and top-p are found by bisection over the bits of a float32, with one all-reduce for each bit,
so they are exact for any k and p. The noise is a function of the row's seed, the index of the draw and the global
column, so sampled tokens depend neither on the mesh nor on the other rows of the batch.

Shape suffixes: B rows, H hidden, V this rank's vocabulary columns, N the most likely tokens that are reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from mtjax.analysis.decoding import REPORTED
from mtjax.generate.byte_matrix import ByteMatrix
from mtjax.models.threefry import threefry
from mtjax.sharding.axes import REPLICATED, map_ranks, spec, varying_like
from mtjax.sharding.vocab import OutputOptions, VocabSpecs, local_logits, local_rows

Table = Array | ByteMatrix
MOST_LIKELY = REPORTED
"""Number of most likely tokens that are reported with their log-probabilities."""
IN_PROMPT = 1 << 30
"""Bit of a count that is set if the token is in the prompt; the lower bits count how often it was sampled."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsParams:
    """Logits processors and warpers of each row; each array is [rows]."""

    temperature: Float[Array, " rows"]
    """Divides the logits; 0 is greedy."""
    top_k: Int[Array, " rows"]
    """Keeps the k most likely tokens (and ties with the last of them); 0 disables it."""
    top_p: Float[Array, " rows"]
    """Keeps the smallest set of most likely tokens whose probabilities add up to p, after top-k; 1 disables it."""
    min_p: Float[Array, " rows"]
    """Keeps tokens with at least this fraction of the most likely token's probability; 0 disables it."""
    repetition: Float[Array, " rows"]
    """Divides positive logits, and multiplies negative ones, of tokens that are in the prompt or were sampled (arXiv
    1909.05858); 1 disables it."""
    presence: Float[Array, " rows"]
    """Subtracted from the logits of tokens that were sampled before."""
    frequency: Float[Array, " rows"]
    """Subtracted from the logits of tokens that were sampled before, once for each occurrence."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of each row."""

    warping: LogitsParams
    seed: UInt32[Array, "rows 2"]
    draw_index: Int[Array, " rows"]
    """Number of tokens that the row has sampled so far."""
    with_logprobs: Bool[Array, " rows"]
    """Whether log-probabilities are reported."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens and natural log-probabilities from the unprocessed logits; zeros if none were requested."""

    token: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    top_ids: Int[Array, "rows n"]
    """The most likely tokens in descending order, at most `MOST_LIKELY`."""
    top_logprobs: Float[Array, "rows n"]


def sample_tokens(
    hidden: Float[Array, "rows embed"],
    table: Float[Array, "vocab embed"] | ByteMatrix,
    counts: Int[Array, "rows vocab"],
    draws: SamplingBatch,
    output: OutputOptions,
    bias: Float[Array, " vocab"] | None = None,
) -> SampledTokens:
    """Samples a token for each row from softmax(hidden @ table.T), with the row's logits processors.

    Args:
      hidden: final hidden states in the compute dtype.
      table: output embedding, rows sharded over `model`.
      counts: occurrences of each token in the row so far (see `IN_PROMPT`), sharded like the table's rows.
      draws: sampling parameters of each row.
      output: how logits are computed; rows of the table from its vocab_size on are padding, and never sampled.
      bias: added to the logits, if any; sharded like the table's rows.
    """
    specs = VocabSpecs.in_force()

    def local(
        hidden_BH: Array, table_VH: Table, bias_V: Array | None, counts_BV: Array, draws: SamplingBatch
    ) -> SampledTokens:
        logits_BV, column_V = _logits(specs, hidden_BH, table_VH, bias_V, output)
        shards = _VocabShards(specs, logits_BV, column_V)
        warping = draws.warping
        # Each lax.cond skips work that no row of the batch needs: most batches have neither penalties nor sampling.
        penalized = (warping.repetition != 1) | (warping.presence != 0) | (warping.frequency != 0)
        warped_BV = lax.cond(
            penalized.any(), _apply_penalties, lambda logits, *_: logits, logits_BV, counts_BV, warping
        )
        greedy = shards.argmax(warped_BV)[1]

        def sample() -> Array:
            return jnp.where(warping.temperature > 0, _sample(shards, warped_BV, draws, output.vocab_size), greedy)

        # The predicate is equal on all ranks, so collectives inside of the branch don't wait for ranks that took the
        # other.
        token = lax.cond((warping.temperature > 0).any(), sample, lambda: greedy)
        return _report_if_requested(shards, token, draws.with_logprobs)

    with jax.named_scope("sampling"):
        in_specs = (REPLICATED, _table_spec(specs, table), specs.bias, spec("batch", "vocab"), REPLICATED)
        return map_ranks(local, in_specs, REPLICATED)(hidden, table, bias, counts, draws)


def score_tokens(
    hidden: Float[Array, "rows embed"],
    table: Float[Array, "vocab embed"] | ByteMatrix,
    tokens: Int[Array, " rows"],
    output: OutputOptions,
    bias: Float[Array, " vocab"] | None = None,
) -> SampledTokens:
    """Returns given tokens with log-probabilities, as if they had been sampled; `bias` is added to the logits."""
    specs = VocabSpecs.in_force()

    def local(hidden_BH: Array, table_VH: Table, bias_V: Array | None, tokens_B: Array) -> SampledTokens:
        logits_BV, column_V = _logits(specs, hidden_BH, table_VH, bias_V, output)
        return _report(_VocabShards(specs, logits_BV, column_V), tokens_B)

    with jax.named_scope("sampling"):
        mapped = map_ranks(local, (REPLICATED, _table_spec(specs, table), specs.bias, REPLICATED), REPLICATED)
        return mapped(hidden, table, bias, tokens)


def _logits(
    specs: VocabSpecs, hidden_BH: Array, table_VH: Table, bias_V: Array | None, output: OutputOptions
) -> tuple[Array, Array]:
    """Computes the local logits [B, V] and the global column of each, [V]."""
    dtype = hidden_BH.dtype
    if isinstance(table_VH, ByteMatrix):
        return local_logits(specs, hidden_BH, table_VH.values.astype(dtype), bias_V, output, table_VH.scales)
    return local_logits(specs, hidden_BH, table_VH.astype(dtype), bias_V, output)


def _table_spec(specs: VocabSpecs, table: Table) -> Any:
    return ByteMatrix(specs.table, specs.bias) if isinstance(table, ByteMatrix) else specs.table  # pyright: ignore[reportArgumentType]


def count_prompt(
    counts: Int[Array, "rows vocab"], row: Int[Array, ""], tokens: Int[Array, " seq"], is_first: Bool[Array, ""]
) -> Int[Array, "rows vocab"]:
    """Marks the tokens of a prompt chunk in one row of `counts`; negative tokens are padding.

    The first chunk of a prompt clears the row, which still has the counts of the slot's previous sequence.
    """

    def local(counts_BV: Array, row: Array, tokens: Array, is_first: Array) -> Array:
        row_V = lax.dynamic_index_in_dim(counts_BV, row, keepdims=False)
        # Set, not added: a prompt may have a token twice, and nothing is sampled before the whole prompt was counted.
        row_V = jnp.where(is_first, 0, row_V).at[_local_index(specs, tokens, counts_BV)].set(IN_PROMPT, mode="drop")
        return lax.dynamic_update_index_in_dim(counts_BV, row_V, row, 0)

    specs, counts_spec = VocabSpecs.in_force(), spec("batch", "vocab")
    in_specs = (counts_spec, REPLICATED, REPLICATED, REPLICATED)
    return map_ranks(local, in_specs, counts_spec)(counts, row, tokens, is_first)


def count_sampled(counts: Int[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Int[Array, "rows vocab"]:
    """Increments the count of each row's token; negative tokens are ignored."""

    def local(counts_BV: Array, tokens_B: Array) -> Array:
        column_B = _local_index(specs, tokens_B, counts_BV)
        return counts_BV.at[jnp.arange(len(tokens_B)), column_B].add(1, mode="drop")

    specs, counts_spec = VocabSpecs.in_force(), spec("batch", "vocab")
    return map_ranks(local, (counts_spec, REPLICATED), counts_spec)(counts, tokens)


def _local_index(specs: VocabSpecs, tokens: Array, counts_BV: Array) -> Array:
    """Returns each token's local column, or V (out of bounds, dropped by scatters) if another rank has it."""
    columns = counts_BV.shape[1]
    row, is_local = local_rows(specs, tokens, columns)
    return jnp.where(is_local, row, columns)


@dataclass(frozen=True)
class _VocabShards:
    """Reductions over the vocabulary shards of all ranks.

    Attributes:
      specs: mesh axes and PartitionSpecs of the vocabulary.
      logits_BV: this rank's logits.
      column_V: their global columns.
    """

    specs: VocabSpecs
    logits_BV: Array
    column_V: Array

    def argmax(self, scores_BV: Array) -> tuple[Array, Array]:
        """Returns each row's maximum and its global column; among ties the lowest, as argmax of the gathered row."""
        value, last = scores_BV.max(-1), scores_BV.shape[1] - 1
        # XLA: not jnp.argmax, which the CPU backend compiles into a scalar loop.
        local_B = jnp.where(scores_BV == value[:, None], jnp.arange(last + 1), last).min(-1)
        top = lax.pmax(value, self.specs.rows)
        column = jnp.where(value == top, self.column_V[local_B], jnp.iinfo(jnp.int32).max)
        return top, lax.pmin(column.astype(jnp.int32), self.specs.rows)

    def sum(self, values_BV: Array) -> Array:
        """Sums over the vocabulary, with an all-reduce."""
        return lax.psum(values_BV.sum(-1), self.specs.rows)

    def all_gather(self, local_BN: Array) -> Array:
        """Concatenates each rank's N columns."""
        # An all-reduce of zero-padded arrays: jax 0.10 does not infer that the result of all_gather is replicated.
        ranks, columns = lax.axis_size(self.specs.rows), local_BN.shape[1]
        is_local = jnp.arange(ranks)[:, None] == lax.axis_index(self.specs.rows)
        padded = jnp.where(is_local, local_BN[:, None], 0).reshape(len(local_BN), ranks * columns)
        return lax.psum(padded, self.specs.rows)


def _apply_penalties(logits_BV: Array, counts_BV: Array, warping: LogitsParams) -> Array:
    """Applies repetition, presence and frequency penalties to logits [B, V]."""
    sampled_BV = counts_BV & (IN_PROMPT - 1)
    repetition = warping.repetition[:, None]
    repeated = jnp.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = jnp.where(counts_BV > 0, repeated, logits_BV)
    logits_BV -= warping.presence[:, None] * (sampled_BV > 0)
    return logits_BV - warping.frequency[:, None] * sampled_BV


def _sample(shards: _VocabShards, logits_BV: Array, draws: SamplingBatch, vocab_size: int) -> Array:
    """Samples with the Gumbel-max trick: the argmax of logits plus noise, among the tokens that the warpers keep."""
    warping = draws.warping
    temperature = jnp.where(warping.temperature > 0, warping.temperature, 1)[:, None]
    scaled_BV = logits_BV / temperature
    top_B = lax.pmax(scaled_BV.max(-1), shards.specs.rows)
    limited = (warping.top_k > 0) | (warping.top_p < 1)
    ordered_BV = _ordered(scaled_BV)
    threshold_B = lax.cond(
        limited.any(),
        lambda: _threshold(shards, scaled_BV - top_B[:, None], ordered_BV, warping, vocab_size),
        lambda: jnp.zeros(len(logits_BV), jnp.uint32),
    )
    # min-p: p >= min_p * p_top is equivalent to score >= top + log(min_p).
    min_score_B = jnp.where(warping.min_p > 0, top_B + jnp.log(warping.min_p), -jnp.inf)
    kept_BV = (ordered_BV >= threshold_B[:, None]) & (scaled_BV >= min_score_B[:, None])
    noise_BV = jax.vmap(_gumbel, (0, 0, None))(draws.seed, draws.draw_index, shards.column_V)
    is_token_V = shards.column_V < vocab_size
    return shards.argmax(jnp.where(kept_BV & is_token_V, scaled_BV + noise_BV, -jnp.inf))[1]


def _threshold(
    shards: _VocabShards, below_top_BV: Array, ordered_BV: Array, warping: LogitsParams, vocab_size: int
) -> Array:
    """Returns the lowest score, in the order of `_ordered`, that top-k followed by top-p keeps; uint32[B]."""
    k_B = jnp.where(warping.top_k > 0, jnp.minimum(warping.top_k, vocab_size), vocab_size)
    top_k_B = _bisect(ordered_BV, lambda over_BV: shards.sum(over_BV.astype(jnp.int32)) >= k_B)
    # exp(score - top) is the probability times a constant, which cancels: top_p is a fraction of the remaining sum.
    probability_BV = jnp.where(ordered_BV >= top_k_B[:, None], jnp.exp(below_top_BV), 0)
    required_B = warping.top_p * shards.sum(probability_BV)
    top_p_B = _bisect(ordered_BV, lambda over_BV: shards.sum(jnp.where(over_BV, probability_BV, 0)) >= required_B)
    return jnp.maximum(top_k_B, jnp.where(warping.top_p < 1, top_p_B, 0))


def _bisect(ordered_BV: Array, holds: Callable[[Array], Array]) -> Array:
    """Returns the highest threshold for which `holds`, a monotonic predicate of bool[B, V] (score >= threshold)."""

    def set_bit(i: Array, threshold_B: Array) -> Array:
        higher_B = threshold_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(ordered_BV >= higher_B[:, None]), higher_B, threshold_B)

    return lax.fori_loop(0, 32, set_bit, jnp.zeros(len(ordered_BV), jnp.uint32))


def _ordered(x: Array) -> Array:
    """Maps float32 to uint32, preserving the order."""
    # The bits of positive floats are already ordered as integers; those of negative ones are in reverse order.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _gumbel(seed: Array, draw_index: Array, column_V: Array) -> Array:
    """Returns Gumbel(0, 1) noise of one row for the given global columns, float32[V]."""
    index_V = jnp.full(column_V.shape, draw_index.astype(jnp.uint32))
    first, second = threefry(seed, varying_like(index_V, column_V), column_V.astype(jnp.uint32))
    # Gumbel = -log(-log(u)) with u = 1 - v: large noise, which decides the argmax, comes from small v, where a float32
    # has many more distinct values than near 1.
    v = ((first ^ second).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, jnp.float32(1 - 2**-24))))


def _report_if_requested(shards: _VocabShards, token_B: Array, with_logprobs: Array) -> SampledTokens:
    """Reports log-probabilities if any row requests them, else zeros."""
    rows, columns = len(token_B), min(MOST_LIKELY, shards.logits_BV.shape[1])

    def nothing() -> SampledTokens:
        zeros = jnp.zeros((rows, columns))
        return SampledTokens(token_B, zeros[:, 0], zeros.astype(jnp.int32), zeros)

    return lax.cond(with_logprobs.any(), lambda: _report(shards, token_B), nothing)


def _report(shards: _VocabShards, token_B: Array) -> SampledTokens:
    """Reports log-probabilities of the tokens and of the most likely ones.

    A token that is among the most likely ones has the bit-identical log-probability there.
    """
    logits_BV = shards.logits_BV
    local_BN, index_BN = lax.top_k(logits_BV, min(MOST_LIKELY, logits_BV.shape[1]))
    # The global top N are among the local top N of all ranks.
    value_BN, column_BN = shards.all_gather(local_BN), shards.all_gather(shards.column_V[index_BN].astype(jnp.int32))
    value_BN, order_BN = lax.top_k(value_BN, local_BN.shape[1])
    column_BN = jnp.take_along_axis(column_BN, order_BN, axis=1)
    row, is_local = local_rows(shards.specs, token_B, logits_BV.shape[1])
    chosen = jnp.where(is_local, jnp.take_along_axis(logits_BV, row[:, None], axis=1)[:, 0], 0)
    top = value_BN[:, 0]
    # One all-reduce for both: the softmax's denominator, and the token's logit, which only one rank has.
    mass, chosen = lax.psum(jnp.stack((jnp.exp(logits_BV - top[:, None]).sum(-1), chosen)), shards.specs.rows)
    log_z = top + jnp.log(mass)
    return SampledTokens(token_B, chosen - log_z, column_BN, value_BN - log_z[:, None])


def greedy_batch(rows: int) -> SamplingBatch:
    """Builds sampling parameters for greedy decoding without log-probabilities."""
    zeros, ones, none = jnp.zeros(rows), jnp.ones(rows), jnp.zeros(rows, jnp.int32)
    warping = LogitsParams(zeros, none, ones, zeros, ones, zeros, zeros)
    return SamplingBatch(warping, jnp.zeros((rows, 2), jnp.uint32), none, jnp.zeros(rows, bool))
