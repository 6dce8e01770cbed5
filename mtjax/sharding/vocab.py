"""Vocabulary-parallel embedding and the cross-entropy fused with its projection (section 3 of the paper).

Each model rank owns a slice of the table's rows. A lookup yields zeros for rows that a rank doesn't own and is summed
over `model`; logits never leave the rank that computed them: only a maximum, a sum of exponentials and the target's
logit are sent per token. Logits exist for one chunk of tokens at a time, in the forward pass and again in the backward
pass.

Shape suffixes: B batch, S sequence, H hidden, V this rank's vocabulary rows, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from mtjax.sharding.axes import dimension_axes, explicit_axes, psum_varying, spec, varying_like
from mtjax.sharding.int8 import Int8Matrix
from mtjax.theory.rules import Axes

NEVER = -1e30
"""Logit of a padding row: its exponential is 0, and it stays finite in products."""


@dataclass(frozen=True)
class VocabSpecs:
    """Where the arguments live, read off the rules once: a `custom_vjp` is traced at times of jax's choosing."""

    table: PartitionSpec
    bias: PartitionSpec
    tokens: PartitionSpec
    hidden: PartitionSpec

    @classmethod
    def in_force(cls, sequence: str = "act_seq") -> "VocabSpecs":
        """By the rules in force; `sequence` is the logical name of the second dimension of hidden states."""
        return cls(spec("vocab", "embed"), spec("vocab"), spec("batch", "seq"), spec("batch", sequence, "embed"))

    @property
    def rows(self) -> Axes:
        """Axes that split the table's rows; over these, lookups and logits are partial."""
        return dimension_axes(self.table, 0)

    @property
    def sequence(self) -> Axes:
        """Axes that split the residual stream's sequence beyond what ranks have of the tokens, some of `rows`."""
        shared = dimension_axes(self.tokens, 1)
        return tuple(axis for axis in dimension_axes(self.hidden, 1) if axis not in shared)

    @property
    def samples(self) -> Axes:
        """Axes that split the samples at this point, over which a table's gradient is summed."""
        return dimension_axes(self.tokens, 0)

    def gather_sequence(self, x: Array) -> Array:
        """Unsplit sequences of an array that is split like the residual stream."""
        return lax.all_gather(x, self.sequence, axis=1, tiled=True) if self.sequence else x

    def sum_into_residual(self, x: Array) -> Array:
        """Sums an array that is partial over `rows`, and splits its sequences like the residual stream's."""
        rest = tuple(axis for axis in self.rows if axis not in self.sequence)
        x = lax.psum(x, rest) if rest else x
        return lax.psum_scatter(x, self.sequence, scatter_dimension=1, tiled=True) if self.sequence else x

    def first_row(self, rows: int) -> Array:
        """The number, in the entire table, of the first of this rank's `rows`."""
        return lax.axis_index(self.rows) * rows


def map_ranks(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`shard_map` over all axes that are still explicit.

    Differentiating through a map inside a manual region does not lower, so every map below stands inside one side of a
    `custom_vjp`.
    """
    return jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=in_specs, out_specs=out_specs)


# --- embedding


def vocab_parallel_embedding(
    table: Float[Array, "vocab embed"] | Int8Matrix, tokens: Int[Array, "batch seq"], dtype: jax.typing.DTypeLike
) -> Float[Array, "batch act_seq embed"]:
    """Rows of a table that is split by rows: one all-reduce over `model`, or one reduce-scatter into a split sequence.

    Args:
      table: [vocab, embed], float32; or in 8 bits with a scale a row, through which no gradient goes.
      tokens: ids in [0, vocab); others give zeros.
      dtype: type of the result and of what is summed.

    Returns:
      [batch, act_seq, embed], placed as the residual stream.
    """
    places, dtype = VocabSpecs.in_force(), jnp.dtype(dtype)
    if isinstance(table, Int8Matrix):
        return _int8_embedding(places, dtype, table, tokens)
    return _embedding(places, dtype, table, tokens)


def _int8_embedding(places: VocabSpecs, dtype: jnp.dtype, table: Int8Matrix, tokens: Array) -> Array:
    def local(table_VH: Int8Matrix, tokens_BS: Array) -> Array:
        row, owned = local_rows(places, tokens_BS, len(table_VH.values))
        vectors = table_VH.values[row] * table_VH.scales[row][..., None]
        return places.sum_into_residual(jnp.where(owned[..., None], vectors, 0).astype(dtype))

    with jax.named_scope("embedding"):
        arguments = (Int8Matrix(places.table, places.bias), places.tokens)  # pyright: ignore[reportArgumentType]
        return map_ranks(local, arguments, places.hidden)(table, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embedding(places: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> Array:
    def local(table_VH: Array, tokens_BS: Array) -> Array:
        row, owned = local_rows(places, tokens_BS, table_VH.shape[0])
        vectors = jnp.where(owned[..., None], table_VH[row].astype(dtype), 0)
        return places.sum_into_residual(vectors)

    with jax.named_scope("embedding"):
        return map_ranks(local, (places.table, places.tokens), places.hidden)(table, tokens)


def _embedding_forward(places: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> tuple[Array, Any]:
    return _embedding(places, dtype, table, tokens), (table, tokens)


def _embedding_backward(places: VocabSpecs, dtype: jnp.dtype, saved: Any, gradient: Array) -> tuple[Array, None]:
    def local(table_VH: Array, tokens_BS: Array, gradient_BSH: Array) -> Array:
        gradient_BSH = places.gather_sequence(gradient_BSH)
        rows, width = table_VH.shape
        row, owned = local_rows(places, tokens_BS, rows)
        row = jnp.where(owned, row, rows)  # one past the end: dropped
        flat = gradient_BSH.reshape(-1, width).astype(jnp.float32)
        # Zeros that wait for the gradient: XLA would lay out others at the beginning of the step, and keep them.
        late_zero = 0 * jnp.abs(flat[0, 0])
        zeros = varying_like(jnp.full((rows, width), late_zero), table_VH, gradient_BSH, tokens_BS)
        return psum_varying(zeros.at[row.reshape(-1)].add(flat, mode="drop"), places.samples)

    with jax.named_scope("embedding"):
        table, tokens = saved
        mapped = map_ranks(local, (places.table, places.tokens, places.hidden), places.table)
        return mapped(table, tokens, gradient), None


_embedding.defvjp(_embedding_forward, _embedding_backward)


def local_rows(places: VocabSpecs, tokens: Array, rows: int) -> tuple[Array, Array]:
    """Row of each token in this rank's slice, 0 where the slice doesn't have it, and whether it does."""
    row = tokens - places.first_row(rows)
    owned = (row >= 0) & (row < rows)
    return jnp.where(owned, row, 0), owned


# --- loss


@dataclass(frozen=True)
class LossOptions:
    """What the cross-entropy computes."""

    vocab_size: int
    """Tokens of the vocabulary; rows of the table from here on are padding and never win."""
    chunk: int = 1024
    """Tokens whose logits are alive at a time."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of log(Z)^2."""
    temperature: float = 1.0
    """By which logits are divided where those of a teacher are learnt (`mtjax.sharding.distillation`)."""


def vocab_parallel_cross_entropy(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    options: LossOptions,
    bias: Float[Array, " vocab"] | None = None,
    sequence: str = "act_seq",
) -> Float[Array, "batch seq"]:
    """Cross-entropy of `hidden @ table.T + bias` against `labels`, token by token, without gathering logits.

    With e = label_smoothing and Z = sum(exp(logits)):
    `log Z - (1 - e) logits[label] - e mean(logits) + z_loss (log Z)^2`.

    Args:
      hidden: [batch, act_seq, embed] in the compute type; products accumulate in float32.
      table: [vocab, embed], float32, rows split over `model`.
      labels: ids in [0, vocab_size).
      options: vocabulary size, chunk length, smoothing and z-loss.
      bias: [vocab], float32, split like the table's rows, if any.
      sequence: logical name of `hidden`'s second dimension: `act_seq` where it is split like the residual stream,
        `seq` where every model rank has all of it.

    Returns:
      Losses in float32. Weight and sum them; a token of weight 0 has no gradient.
    """
    return _cross_entropy(VocabSpecs.in_force(sequence), options, hidden, table, bias, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    places: VocabSpecs, options: LossOptions, hidden: Array, table: Array, bias: Array | None, labels: Array
) -> Array:
    return _cross_entropy_forward(places, options, hidden, table, bias, labels)[0]


def _cross_entropy_forward(
    places: VocabSpecs, options: LossOptions, hidden: Array, table: Array, bias: Array | None, labels: Array
) -> tuple[Array, Any]:
    def local(hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array) -> tuple[Array, Array]:
        top, scale, target, *rest = _summaries(places, options, hidden_BSH, table_VH, bias_V, labels_BS)
        log_z = jnp.log(scale) + top
        mean = rest[0] / options.vocab_size if rest else 0.0
        loss = log_z - (1 - options.label_smoothing) * target - options.label_smoothing * mean
        return loss + options.z_loss * log_z**2, log_z

    with jax.named_scope("loss"):
        arguments = (places.hidden, places.table, places.bias, places.tokens)
        mapped = map_ranks(local, arguments, (places.tokens, places.tokens))
        loss, log_z = mapped(hidden, table, bias, labels)
        return loss, (hidden, table, bias, labels, log_z)


def _cross_entropy_backward(
    places: VocabSpecs, options: LossOptions, saved: Any, gradient: Array
) -> tuple[Array, Array, Array | None, None]:
    def local(
        hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array, log_z_BS: Array, gradient_BS: Array
    ) -> tuple[Array, Array, Array | None]:
        hidden_BSH = places.gather_sequence(hidden_BSH)  # again: only the split one is kept
        chunks = Chunks.of(hidden_BSH, options.chunk)
        cast_VH = table_VH.astype(hidden_BSH.dtype)

        def differentiate_chunk(sums: tuple[Array, Array | None], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
            table_gradient_VH, bias_gradient_V = sums
            hidden_CH, labels_C, log_z_C, gradient_C = chunk
            logits_CV, column_V = local_logits(places, hidden_CH, cast_VH, bias_V, options.vocab_size)
            z_term = 1 + 2 * options.z_loss * log_z_C
            slope = jnp.exp(logits_CV - log_z_C[:, None]) * z_term[:, None]
            slope -= (column_V == labels_C[:, None]) * (1 - options.label_smoothing)
            slope -= options.label_smoothing / options.vocab_size
            slope = jnp.where(column_V < options.vocab_size, slope * gradient_C[:, None], 0)
            bias_gradient_V = None if bias_gradient_V is None else bias_gradient_V + slope.sum(0)
            slope = slope.astype(hidden_CH.dtype)
            table_gradient_VH += lax.dot_general(
                slope, hidden_CH, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return (table_gradient_VH, bias_gradient_V), slope @ cast_VH

        like = (hidden_BSH, table_VH, labels_BS, gradient_BS)
        zeros = varying_like(jnp.zeros(table_VH.shape, jnp.float32), *like)
        bias_zeros = None if bias_V is None else varying_like(jnp.zeros(bias_V.shape, jnp.float32), *like)
        pieces = tuple(chunks.split(a) for a in (hidden_BSH, labels_BS, log_z_BS, gradient_BS))
        (table_gradient, bias_gradient), hidden_gradient = lax.scan(differentiate_chunk, (zeros, bias_zeros), pieces)
        hidden_gradient = places.sum_into_residual(chunks.join(hidden_gradient, hidden_BSH.shape))
        bias_gradient = None if bias_gradient is None else psum_varying(bias_gradient, places.samples)
        return hidden_gradient, psum_varying(table_gradient, places.samples), bias_gradient

    with jax.named_scope("loss"):
        parameters, tokens = (places.hidden, places.table, places.bias), places.tokens
        mapped = map_ranks(local, (*parameters, tokens, tokens, tokens), parameters)
        return *mapped(*saved, gradient), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _summaries(
    places: VocabSpecs, options: LossOptions, hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array
) -> tuple[Array, ...]:
    """What is known of each token's logits without gathering them, inside the map.

    The largest of all ranks, the sum of exponentials below it, the label's, and with label smoothing their sum.
    """
    hidden_BSH = places.gather_sequence(hidden_BSH)
    chunks = Chunks.of(hidden_BSH, options.chunk)
    table_VH = table_VH.astype(hidden_BSH.dtype)

    def reduce_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, ...]]:
        hidden_CH, labels_C = chunk
        logits_CV, column_V = local_logits(places, hidden_CH, table_VH, bias_V, options.vocab_size)
        highest = logits_CV.max(-1)
        scale = jnp.exp(logits_CV - highest[:, None]).sum(-1)
        row, owned = local_rows(places, labels_C, table_VH.shape[0])
        target = jnp.where(owned, jnp.take_along_axis(logits_CV, row[:, None], axis=1)[:, 0], 0)
        return None, (highest, scale, target, _sum_of_real(logits_CV, column_V, options))

    _, parts = lax.scan(reduce_chunk, None, (chunks.split(hidden_BSH), chunks.split(labels_BS)))
    highest, scale, target, total = (chunks.join(p, labels_BS.shape) for p in parts)
    top = lax.pmax(highest, places.rows)
    sums = (scale * jnp.exp(highest - top), target) + ((total,) if options.label_smoothing else ())
    # As one array: otherwise the compiler may sum one of them after the mean over tokens, not where expected.
    return top, *lax.psum(jnp.stack(sums), places.rows)


def vocab_parallel_scores(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    options: LossOptions,
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """The log-probability of each label, float32, and whether no token is more likely; sends what the loss sends.

    Arguments are those of `vocab_parallel_cross_entropy`; smoothing and z-loss don't matter.
    """
    places, plain = VocabSpecs.in_force(), replace(options, label_smoothing=0.0)

    def local(hidden_BSH: Array, table_VH: Array, labels_BS: Array) -> tuple[Array, Array]:
        top, scale, target = _summaries(places, plain, hidden_BSH, table_VH, None, labels_BS)
        return target - top - jnp.log(scale), target == top

    with jax.named_scope("loss"):
        arguments = (places.hidden, places.table, places.tokens)
        return map_ranks(local, arguments, (places.tokens, places.tokens))(hidden, table, labels)


def local_logits(
    places: VocabSpecs,
    hidden_CH: Array,
    table_VH: Array,
    bias_V: Array | None,
    vocab_size: int,
    scales_V: Array | None = None,
) -> tuple[Array, Array]:
    """float32 logits of this rank's columns, and which columns of the entire vocabulary they are.

    Of a table in 8 bits, the numbers are given in the type of the hidden states, and the rows' scales.
    """
    logits = lax.dot_general(hidden_CH, table_VH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    logits = logits if scales_V is None else logits * scales_V
    logits = logits if bias_V is None else logits + bias_V
    rows = table_VH.shape[0]
    column = places.first_row(rows) + jnp.arange(rows)
    # Padding comes last: only columns that may be padding are overwritten, else XLA on CPUs writes all logits twice.
    start = max(0, vocab_size - (lax.axis_size(places.rows) - 1) * rows)
    if start < rows:
        tail = jnp.where(column[start:] < vocab_size, logits[:, start:], NEVER)
        logits = lax.dynamic_update_slice_in_dim(logits, tail, start, axis=1)
    return logits, column


def _sum_of_real(logits_CV: Array, column_V: Array, options: LossOptions) -> Array:
    """Sum of the logits that are not padding: label smoothing's part of the forward pass."""
    if not options.label_smoothing:
        return varying_like(jnp.zeros(logits_CV.shape[:1]), logits_CV)
    return jnp.where(column_V < options.vocab_size, logits_CV, 0).sum(-1)


@dataclass(frozen=True)
class Chunks:
    """A rank's tokens in equal chunks of at most `size`, the last one filled up with zeros."""

    tokens: int
    count: int

    @classmethod
    def of(cls, hidden_BSH: Array, size: int) -> "Chunks":
        """Those of [B, S, ...]."""
        tokens = hidden_BSH.shape[0] * hidden_BSH.shape[1]
        return cls(tokens, -(-tokens // size))

    @property
    def length(self) -> int:
        """Tokens of a chunk."""
        return -(-self.tokens // self.count)

    def split(self, a: Array) -> Array:
        """[B, S, ...] -> [chunks, C, ...]."""
        flat = a.reshape(self.tokens, *a.shape[2:])
        fill = self.count * self.length - self.tokens
        if fill:
            flat = jnp.pad(flat, [(0, fill)] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(self.count, self.length, *a.shape[2:])

    def join(self, a: Array, shape: tuple[int, ...]) -> Array:
        """[chunks, C, ...] -> [B, S, ...], without the filling."""
        return a.reshape(-1, *a.shape[2:])[: self.tokens].reshape(shape)
