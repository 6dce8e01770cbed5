"""The next token of each row, drawn where its logits are: vocabulary-parallel sampling.

Each model rank computes the logits of its own columns of the vocabulary, as in `mtjax.sharding.vocab`, and they stay
there. What is sent are a few numbers for each row: a maximum and whose it is, sums of probabilities, counts. Thresholds
of top-k and top-p are found by bisection over the bits of a float32, with one sum for each bit, so they are exact for
any k and p. Noise derives from a row's seed, the number of the draw and the column in the entire vocabulary: what is
drawn depends neither on the mesh nor on the other rows.

Shape suffixes: B rows, H hidden, V this rank's vocabulary columns, N the most likely ones that are reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt32

from mtjax.models.threefry import threefry
from mtjax.sharding.axes import REPLICATED, spec, varying_like
from mtjax.sharding.int8 import Int8Matrix
from mtjax.sharding.vocab import VocabSpecs, local_logits, local_rows, map_ranks
from mtjax.theory.decoding import REPORTED

Table = Array | Int8Matrix
MOST_LIKELY = REPORTED
"""Columns that are reported with their log-probabilities."""
IN_PROMPT = 1 << 30
"""Bit of a count that says the token is in the prompt; the bits below count how often it was drawn."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitsParams:
    """How logits become the distribution that is drawn from; each array is [rows]."""

    temperature: Float[Array, " rows"]
    """By which logits are divided; 0 takes the most likely token."""
    top_k: Int[Array, " rows"]
    """Only the k most likely tokens (and those as likely as the last of them); 0 takes all."""
    top_p: Float[Array, " rows"]
    """Only the most likely tokens whose probabilities reach p together; 1 takes all. Behind top_k."""
    min_p: Float[Array, " rows"]
    """Only tokens at least this share as likely as the most likely one; 0 takes all."""
    repetition: Float[Array, " rows"]
    """Divides positive logits, and multiplies negative ones, of tokens of the prompt and of those drawn (arXiv
    1909.05858); 1 changes nothing."""
    presence: Float[Array, " rows"]
    """Subtracted from the logits of tokens drawn before."""
    frequency: Float[Array, " rows"]
    """Subtracted from the logits of tokens drawn before, once for each time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingBatch:
    """What each row asks for."""

    warping: LogitsParams
    seed: UInt32[Array, "rows 2"]
    number: Int[Array, " rows"]
    """Of the draw, from 0."""
    reports: Bool[Array, " rows"]
    """Whether log-probabilities are wanted."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampledTokens:
    """The tokens, and natural log-probabilities by the model itself, before any warping; zeros where not wanted."""

    token: Int[Array, " rows"]
    logprob: Float[Array, " rows"]
    likely: Int[Array, "rows n"]
    """The most likely tokens, in descending order; up to `MOST_LIKELY`."""
    likely_logprobs: Float[Array, "rows n"]


def draw_tokens(
    hidden: Float[Array, "rows embed"],
    table: Float[Array, "vocab embed"] | Int8Matrix,
    counts: Int[Array, "rows vocab"],
    draws: SamplingBatch,
    vocab_size: int,
) -> SampledTokens:
    """Draws a token for each row from softmax(hidden @ table.T), warped as the row asks.

    Args:
      hidden: final hidden states in the compute type.
      table: rows split over `model`.
      counts: of each token in the row so far (see `IN_PROMPT`), split like the table's rows.
      draws: what each row asks for.
      vocab_size: rows of the table from here on are padding, and never drawn.
    """
    places = VocabSpecs.in_force()

    def local(hidden_BH: Array, table_VH: Table, counts_BV: Array, draws: SamplingBatch) -> SampledTokens:
        logits_BV, column_V = _logits(places, hidden_BH, table_VH, None, vocab_size)
        ranks = _Ranks(places, logits_BV, column_V)
        warping = draws.warping
        penalised = (warping.repetition != 1) | (warping.presence != 0) | (warping.frequency != 0)
        warped_BV = lax.cond(penalised.any(), _penalise, lambda logits, *_: logits, logits_BV, counts_BV, warping)
        greedy = ranks.best(warped_BV)[1]

        def sample() -> Array:
            return jnp.where(warping.temperature > 0, _sample(ranks, warped_BV, draws, vocab_size), greedy)

        token = lax.cond((warping.temperature > 0).any(), sample, lambda: greedy)
        return _reported(ranks, token, draws.reports)

    with jax.named_scope("sampling"):
        mapped = map_ranks(
            local, (REPLICATED, _place_of(places, table), spec("batch", "vocab"), REPLICATED), REPLICATED
        )
        return mapped(hidden, table, counts, draws)


def score_tokens(
    hidden: Float[Array, "rows embed"],
    table: Float[Array, "vocab embed"] | Int8Matrix,
    tokens: Int[Array, " rows"],
    vocab_size: int,
    bias: Float[Array, " vocab"] | None = None,
) -> SampledTokens:
    """Log-probabilities of given tokens, reported as if they had been drawn; `bias` is added to the logits."""
    places = VocabSpecs.in_force()

    def local(hidden_BH: Array, table_VH: Table, tokens_B: Array, *bias_V: Array) -> SampledTokens:
        logits_BV, column_V = _logits(places, hidden_BH, table_VH, bias_V[0] if bias_V else None, vocab_size)
        return _report(_Ranks(places, logits_BV, column_V), tokens_B)

    given, where = ((), ()) if bias is None else ((bias,), (places.bias,))
    with jax.named_scope("sampling"):
        mapped = map_ranks(local, (REPLICATED, _place_of(places, table), REPLICATED, *where), REPLICATED)
        return mapped(hidden, table, tokens, *given)


def _logits(
    places: VocabSpecs, hidden_BH: Array, table_VH: Table, bias_V: Array | None, vocab_size: int
) -> tuple[Array, Array]:
    dtype = hidden_BH.dtype
    if isinstance(table_VH, Int8Matrix):
        return local_logits(places, hidden_BH, table_VH.values.astype(dtype), bias_V, vocab_size, table_VH.scales)
    return local_logits(places, hidden_BH, table_VH.astype(dtype), bias_V, vocab_size)


def _place_of(places: VocabSpecs, table: Table) -> Any:
    return Int8Matrix(places.table, places.bias) if isinstance(table, Int8Matrix) else places.table  # pyright: ignore[reportArgumentType]


def count_prompt(
    counts: Int[Array, "rows vocab"], row: Int[Array, ""], tokens: Int[Array, " seq"], is_first: Bool[Array, ""]
) -> Int[Array, "rows vocab"]:
    """`counts` in which one row's prompt has these tokens too; negative ones are none. The first ones clear the row."""

    def local(counts_BV: Array, row: Array, tokens: Array, is_first: Array) -> Array:
        own_V = lax.dynamic_index_in_dim(counts_BV, row, keepdims=False)
        own_V = jnp.where(is_first, 0, own_V).at[_own_or_outside(places, tokens, counts_BV)].set(IN_PROMPT, mode="drop")
        return lax.dynamic_update_index_in_dim(counts_BV, own_V, row, 0)

    places, place = VocabSpecs.in_force(), spec("batch", "vocab")
    return map_ranks(local, (place, REPLICATED, REPLICATED, REPLICATED), place)(counts, row, tokens, is_first)


def count_drawn(counts: Int[Array, "rows vocab"], tokens: Int[Array, " rows"]) -> Int[Array, "rows vocab"]:
    """`counts` in which each row has one more of its token; negative ones are none."""

    def local(counts_BV: Array, tokens_B: Array) -> Array:
        at = _own_or_outside(places, tokens_B, counts_BV)
        return counts_BV.at[jnp.arange(len(tokens_B)), at].add(1, mode="drop")

    places, place = VocabSpecs.in_force(), spec("batch", "vocab")
    return map_ranks(local, (place, REPLICATED), place)(counts, tokens)


def _own_or_outside(places: VocabSpecs, tokens: Array, counts_BV: Array) -> Array:
    columns = counts_BV.shape[1]
    row, owned = local_rows(places, tokens, columns)
    return jnp.where(owned, row, columns)


@dataclass(frozen=True)
class _Ranks:
    """What the ranks tell each other about their columns."""

    places: VocabSpecs
    logits_BV: Array
    column_V: Array

    def best(self, scores_BV: Array) -> tuple[Array, Array]:
        """The highest score of each row and its column: the first of several, as argmax of the gathered row has it."""
        value, last = scores_BV.max(-1), scores_BV.shape[1] - 1
        # Not argmax, of which XLA for CPUs makes a loop over single numbers.
        own = jnp.where(scores_BV == value[:, None], jnp.arange(last + 1), last).min(-1)
        top = lax.pmax(value, self.places.rows)
        column = jnp.where(value == top, self.column_V[own], jnp.iinfo(jnp.int32).max)
        return top, lax.pmin(column.astype(jnp.int32), self.places.rows)

    def sum(self, values_BV: Array) -> Array:
        """Over the vocabulary."""
        return lax.psum(values_BV.sum(-1), self.places.rows)

    def side_by_side(self, own_BN: Array) -> Array:
        """Every rank's few columns, by a sum: jax 0.10 does not know of its all-gather that all ranks get the same."""
        ranks, few = lax.axis_size(self.places.rows), own_BN.shape[1]
        is_own = jnp.arange(ranks)[:, None] == lax.axis_index(self.places.rows)
        spread = jnp.where(is_own, own_BN[:, None], 0).reshape(len(own_BN), ranks * few)
        return lax.psum(spread, self.places.rows)


def _penalise(logits_BV: Array, counts_BV: Array, warping: LogitsParams) -> Array:
    drawn_BV = counts_BV & (IN_PROMPT - 1)
    repetition = warping.repetition[:, None]
    repeated = jnp.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = jnp.where(counts_BV > 0, repeated, logits_BV)
    logits_BV -= warping.presence[:, None] * (drawn_BV > 0)
    return logits_BV - warping.frequency[:, None] * drawn_BV


def _sample(ranks: _Ranks, logits_BV: Array, draws: SamplingBatch, vocab_size: int) -> Array:
    """The columns of the highest sums of logit and Gumbel noise, among those that the warping lets through."""
    warping = draws.warping
    temperature = jnp.where(warping.temperature > 0, warping.temperature, 1)[:, None]
    scaled_BV = logits_BV / temperature
    top_B = lax.pmax(scaled_BV.max(-1), ranks.places.rows)
    limited = (warping.top_k > 0) | (warping.top_p < 1)
    ordered_BV = _ordered(scaled_BV)
    threshold_B = lax.cond(
        limited.any(),
        lambda: _threshold(ranks, scaled_BV - top_B[:, None], ordered_BV, warping, vocab_size),
        lambda: jnp.zeros(len(logits_BV), jnp.uint32),
    )
    least_B = jnp.where(warping.min_p > 0, top_B + jnp.log(warping.min_p), -jnp.inf)
    kept_BV = (ordered_BV >= threshold_B[:, None]) & (scaled_BV >= least_B[:, None])
    noise_BV = jax.vmap(_gumbel, (0, 0, None))(draws.seed, draws.number, ranks.column_V)
    is_token_V = ranks.column_V < vocab_size
    return ranks.best(jnp.where(kept_BV & is_token_V, scaled_BV + noise_BV, -jnp.inf))[1]


def _threshold(ranks: _Ranks, below_top_BV: Array, ordered_BV: Array, warping: LogitsParams, vocab_size: int) -> Array:
    """The lowest score, as `_ordered` writes it, that top-k and then top-p let through."""
    most = jnp.where(warping.top_k > 0, jnp.minimum(warping.top_k, vocab_size), vocab_size)
    by_count = _bisect(ordered_BV, lambda over_BV: ranks.sum(over_BV.astype(jnp.int32)) >= most)
    probability_BV = jnp.where(ordered_BV >= by_count[:, None], jnp.exp(below_top_BV), 0)
    enough = warping.top_p * ranks.sum(probability_BV)
    by_mass = _bisect(ordered_BV, lambda over_BV: ranks.sum(jnp.where(over_BV, probability_BV, 0)) >= enough)
    return jnp.maximum(by_count, jnp.where(warping.top_p < 1, by_mass, 0))


def _bisect(ordered_BV: Array, holds: Callable[[Array], Array]) -> Array:
    """The highest threshold at which `holds`, of which columns reach it, is true, as it is of all lower ones."""

    def turn(i: Array, threshold_B: Array) -> Array:
        higher_B = threshold_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(ordered_BV >= higher_B[:, None]), higher_B, threshold_B)

    return lax.fori_loop(0, 32, turn, jnp.zeros(len(ordered_BV), jnp.uint32))


def _ordered(x: Array) -> Array:
    """float32 as uint32 in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def _gumbel(seed: Array, number: Array, column_V: Array) -> Array:
    """Noise whose highest sum with logits falls on each column with its probability (Gumbel-max)."""
    count = jnp.full(column_V.shape, number.astype(jnp.uint32))
    first, second = threefry(seed, varying_like(count, column_V), column_V.astype(jnp.uint32))
    # Of -log(1 - v), small values matter: there v, from 32 bits, is fine-grained.
    v = ((first ^ second).astype(jnp.float32) + 0.5) * jnp.float32(2**-32)
    return -jnp.log(-jnp.log1p(-jnp.minimum(v, jnp.float32(1 - 2**-24))))


def _reported(ranks: _Ranks, token_B: Array, reports: Array) -> SampledTokens:
    rows, few = len(token_B), min(MOST_LIKELY, ranks.logits_BV.shape[1])

    def nothing() -> SampledTokens:
        zeros = jnp.zeros((rows, few))
        return SampledTokens(token_B, zeros[:, 0], zeros.astype(jnp.int32), zeros)

    return lax.cond(reports.any(), lambda: _report(ranks, token_B), nothing)


def _report(ranks: _Ranks, token_B: Array) -> SampledTokens:
    """Log-probabilities; a token that is among the most likely has the very number that it has there."""
    logits_BV = ranks.logits_BV
    own_BN, index_BN = lax.top_k(logits_BV, min(MOST_LIKELY, logits_BV.shape[1]))
    value_BN, likely_BN = ranks.side_by_side(own_BN), ranks.side_by_side(ranks.column_V[index_BN].astype(jnp.int32))
    value_BN, order_BN = lax.top_k(value_BN, own_BN.shape[1])
    likely_BN = jnp.take_along_axis(likely_BN, order_BN, axis=1)
    row, owned = local_rows(ranks.places, token_B, logits_BV.shape[1])
    chosen = jnp.where(owned, jnp.take_along_axis(logits_BV, row[:, None], axis=1)[:, 0], 0)
    top = value_BN[:, 0]
    mass, chosen = lax.psum(jnp.stack((jnp.exp(logits_BV - top[:, None]).sum(-1), chosen)), ranks.places.rows)
    log_z = top + jnp.log(mass)
    return SampledTokens(token_B, chosen - log_z, likely_BN, value_BN - log_z[:, None])
