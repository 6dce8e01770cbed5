"""Vocabulary-parallel embedding and cross-entropy, fused with the projection to logits (arXiv 1909.08053, section 3).

The rows of the table are sharded over `model`. Logits stay on the rank that computed them: per token only a maximum, a
sum of exponentials and the label's logit are reduced. Logits exist for one chunk of tokens at a time, and are
recomputed in the backward pass.

Shape suffixes: B batch, S sequence, H hidden, V this rank's vocabulary rows, C tokens of a chunk.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import dimension_axes, map_ranks, psum_varying, spec, varying_like
from mtjax.sharding.token_chunks import TokenChunks

if TYPE_CHECKING:
    from mtjax.sharding.stored_weight import StoredWeight


PADDING_LOGIT = -1e30
"""Logit of a padding row: its exponential is 0, and it stays finite in products."""


@dataclass(frozen=True)
class VocabSpecs:
    """Shardings of the arguments, read from the rules once: jax may trace a `custom_vjp` later, without the rules."""

    table: PartitionSpec
    bias: PartitionSpec
    tokens: PartitionSpec
    hidden: PartitionSpec

    @classmethod
    def in_force(cls, sequence: str = "act_seq") -> "VocabSpecs":
        """Reads the rules in force; `sequence` is the logical name of the second dimension of hidden states."""
        width = "act_embed" if sequence == "act_seq" else "embed"
        return cls(spec("vocab", "embed"), spec("vocab"), spec("batch", "seq"), spec("batch", sequence, width))

    @property
    def rows(self) -> Axes:
        """Axes over which the table's rows are sharded; over these, lookups are partial sums."""
        return dimension_axes(self.table, 0)

    @property
    def residual_sharding(self) -> tuple[int, Axes]:
        """Dimension of hidden states, their sequence or width, and those of `rows` over which only they are sharded."""
        of_tokens = dimension_axes(self.tokens, 1)
        sequence = tuple(axis for axis in dimension_axes(self.hidden, 1) if axis not in of_tokens)
        return (1, sequence) if sequence else (2, dimension_axes(self.hidden, 2))

    @property
    def samples(self) -> Axes:
        """Axes that are explicit here and shard samples, over which a table's gradient is all-reduced; () in the manual
        region, where the step reduces it."""
        return dimension_axes(self.tokens, 0)

    def gather_hidden(self, x: Array) -> Array:
        """All-gathers an array [B, S, H] that is sharded like hidden states along what `residual_sharding` names."""
        dim, axes = self.residual_sharding
        return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x

    def sum_into_residual(self, x: Array) -> Array:
        """Reduces an array [B, S, H] of partial sums over `rows`; reduce-scatters it along `residual_sharding`."""
        dim, axes = self.residual_sharding
        all_reduced = tuple(axis for axis in self.rows if axis not in axes)
        x = lax.psum(x, all_reduced) if all_reduced else x
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def local_rows(specs: VocabSpecs, tokens: Array, rows: int) -> tuple[Array, Array]:
    """Returns each token's row in this rank's shard of `rows` rows, 0 where another rank has it, and whether this rank
    has it."""
    row = tokens - lax.axis_index(specs.rows) * rows
    owned = (row >= 0) & (row < rows)
    return jnp.where(owned, row, 0), owned


def vocab_parallel_embedding(
    table: "Array | StoredWeight", tokens: Int[Array, "batch seq"], dtype: jax.typing.DTypeLike
) -> Float[Array, "batch act_seq embed"]:
    """Looks up rows of a table whose rows are sharded.

    Communication: one all-reduce over `model`, or with sequence parallelism one reduce-scatter.

    Args:
      table: [vocab, embed], float32; or stored in another form, which has no gradient.
      tokens: ids in [0, vocab); other ids give zeros.
      dtype: type of the result, which is sharded like hidden states, and of the communication.
    """
    specs, dtype = VocabSpecs.in_force(), jnp.dtype(dtype)
    if not isinstance(table, Array):
        with jax.named_scope("embedding"):
            return table.rows(specs, tokens, dtype)
    return _embedding(specs, dtype, table, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embedding(specs: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> Array:
    """Looks up rows of a float32 table: [batch, seq] -> [batch, act_seq, embed]."""

    def local(table_VH: Array, tokens_BS: Array) -> Array:
        row, owned = local_rows(specs, tokens_BS, table_VH.shape[0])
        # Exactly one rank has a token's row, the others contribute zeros to the reduction.
        vectors = jnp.where(owned[..., None], table_VH[row].astype(dtype), 0)
        return specs.sum_into_residual(vectors)

    with jax.named_scope("embedding"):
        return map_ranks(local, (specs.table, specs.tokens), specs.hidden)(table, tokens)


def _embedding_forward(specs: VocabSpecs, dtype: jnp.dtype, table: Array, tokens: Array) -> tuple[Array, Any]:
    return _embedding(specs, dtype, table, tokens), (table, tokens)


def _embedding_backward(specs: VocabSpecs, dtype: jnp.dtype, saved: Any, gradient: Array) -> tuple[Array, None]:
    """Scatter-adds the gradient [batch, act_seq, embed] to the rows of the table [vocab, embed], in float32."""

    def local(table_VH: Array, tokens_BS: Array, gradient_BSH: Array) -> Array:
        """Computes the gradient of this rank's rows, inside the map."""
        gradient_BSH = specs.gather_hidden(gradient_BSH)
        rows, width = table_VH.shape
        row, owned = local_rows(specs, tokens_BS, rows)
        row = jnp.where(owned, row, rows)  # one past the end: dropped by the scatter
        flat = gradient_BSH.reshape(-1, width).astype(jnp.float32)
        # XLA: constant zeros would be allocated at the beginning of the step. These depend on the gradient.
        late_zero = 0 * jnp.abs(flat[0, 0])
        zeros = varying_like(jnp.full((rows, width), late_zero), table_VH, gradient_BSH, tokens_BS)
        # XLA: where the gradient is then reduce-scattered along the width (ZeRO), layout assignment would transpose it,
        # and every element of a token's vector would be added to another row, by a compare-and-swap loop. In this
        # layout a token's vector is contiguous; transposing the sum once costs its bytes.
        added = with_layout_constraint(zeros.at[row.reshape(-1)].add(flat, mode="drop"), MemoryLayout((0, 1)))
        return psum_varying(added, specs.samples)

    with jax.named_scope("embedding"):
        table, tokens = saved
        return map_ranks(local, (specs.table, specs.tokens, specs.hidden), specs.table)(table, tokens, gradient), None


_embedding.defvjp(_embedding_forward, _embedding_backward)


@dataclass(frozen=True)
class OutputOptions:
    """How logits follow from products with the output table."""

    vocab_size: int
    """Tokens of the vocabulary; later rows of the table are padding, with probability 0."""
    scale: float = field(default=1.0, kw_only=True)
    """Factor of the logits."""
    softcap: float | None = field(default=None, kw_only=True)
    """c: logits are c tanh(l / c) of the scaled ones l, where given."""

    def logits(self, products: Array, bias: Array | None) -> Array:
        """Computes logits from products with the output table."""
        # A factor of 1 would be one more operation on all logits.
        logits = products if bias is None else products + bias
        logits = logits * self.scale if self.scale != 1 else logits
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def gradient(self, slope: Array, logits: Array) -> Array:
        """Computes the gradient of the products from that of the logits."""
        slope = slope if self.scale == 1 else slope * self.scale
        # The derivative of tanh(u) is 1 - tanh(u)^2, and logits / softcap is tanh(u).
        return slope if self.softcap is None else slope * (1 - jnp.square(logits / self.softcap))


@dataclass(frozen=True)
class LossOptions(OutputOptions):
    """Options of the cross-entropy."""

    chunk: int = 1024
    """Tokens whose logits are alive at a time."""
    label_smoothing: float = 0.0
    """Fraction of the target that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of log(Z)^2."""
    fuses_gradient: bool = field(default=False, kw_only=True)
    """Whether a decoder's gradients are computed with its loss (`mtjax.sharding.vocab_weighted`)."""
    temperature: float = 1.0
    """Divisor of the logits in distillation (`mtjax.sharding.distillation`)."""


def vocab_parallel_cross_entropy(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    options: LossOptions,
    bias: Float[Array, " vocab"] | None = None,
    sequence: str = "act_seq",
) -> Float[Array, "batch seq"]:
    """Computes the cross-entropy of `hidden @ table.T + bias` with `labels`, per token, without gathering logits.

    Logits are these products, scaled and soft-capped as the options say. With e = label_smoothing and
    Z = sum(exp(logits)): `log Z - (1 - e) logits[label] - e mean(logits) + z_loss (log Z)^2`.

    Args:
      hidden: in the compute type; products accumulate in float32.
      table: float32, rows sharded over `model`.
      labels: ids in [0, vocab_size).
      options: vocabulary size, chunk length, smoothing and z-loss.
      bias: float32, sharded like the table's rows, if any.
      sequence: logical name of `hidden`'s second dimension: `act_seq` where it is sharded like hidden states between
        layers, `seq` where it is replicated over `model`.

    Returns:
      Losses, float32, to be weighted and summed; a token of weight 0 has no gradient.
    """
    return _cross_entropy(VocabSpecs.in_force(sequence), options, hidden, table, bias, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _cross_entropy(
    specs: VocabSpecs, options: LossOptions, hidden: Array, table: Array, bias: Array | None, labels: Array
) -> Array:
    return _cross_entropy_forward(specs, options, hidden, table, bias, labels)[0]


def _cross_entropy_forward(
    specs: VocabSpecs, options: LossOptions, hidden: Array, table: Array, bias: Array | None, labels: Array
) -> tuple[Array, Any]:
    """Computes losses [batch, seq]; the residuals are the arguments and log Z, not logits."""

    def local(hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array) -> tuple[Array, Array]:
        """Computes losses and log Z of this rank's tokens, inside the map."""
        of_logits = summaries_of(specs, options, hidden_BSH, table_VH, bias_V, labels_BS)
        # Each exponential is relative to the token's largest logit, so that none overflows.
        log_z, smoothing = jnp.log(of_logits.exponentials) + of_logits.maximum, options.label_smoothing
        mean = 0.0 if of_logits.logit_sum is None else of_logits.logit_sum / options.vocab_size
        loss = log_z - (1 - smoothing) * of_logits.label - smoothing * mean
        return loss + options.z_loss * log_z**2, log_z

    with jax.named_scope("loss"):
        arguments, shardings = (hidden, table, bias, labels), (specs.hidden, specs.table, specs.bias, specs.tokens)
        loss, log_z = map_ranks(local, shardings, (specs.tokens, specs.tokens))(*arguments)
        # With log Z the backward pass has the probabilities without another reduction over ranks.
        return loss, (*arguments, log_z)


def _cross_entropy_backward(
    specs: VocabSpecs, options: LossOptions, saved: Any, gradient: Array
) -> tuple[Array, Array, Array | None, None]:
    """Recomputes logits chunk by chunk, and from them the gradients of hidden states, table and bias."""

    def local(
        hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array, log_z_BS: Array, gradient_BS: Array
    ) -> tuple[Array, Array, Array | None]:
        """Computes the gradients of this rank's hidden states, table rows and biases, inside the map."""
        hidden_BSH = specs.gather_hidden(hidden_BSH)  # recomputed: only the sharded one is saved
        chunks = TokenChunks.of(hidden_BSH, options.chunk)
        cast_VH = table_VH.astype(hidden_BSH.dtype)  # once, not per chunk

        def differentiate_chunk(sums: tuple[Array, Array | None], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
            """Adds a chunk to the gradients of table and bias; returns that of its hidden states [C, H]."""
            hidden_CH, labels_C, log_z_C, gradient_C = chunk
            logits_CV, column_V = local_logits(specs, hidden_CH, cast_VH, bias_V, options)
            slope = logit_gradient(options, logits_CV, column_V, labels_C, log_z_C, gradient_C)
            return add_chunk(sums, slope, hidden_CH, cast_VH)

        # A scan's carry has one type from the first chunk on: zeros vary over all axes over which what is added does.
        like = (hidden_BSH, table_VH, labels_BS, gradient_BS)
        zeros = varying_like(jnp.zeros(table_VH.shape, jnp.float32), *like)
        bias_zeros = None if bias_V is None else varying_like(jnp.zeros(bias_V.shape, jnp.float32), *like)
        pieces = tuple(chunks.split(a) for a in (hidden_BSH, labels_BS, log_z_BS, gradient_BS))
        (table_gradient, bias_gradient), hidden_gradient = lax.scan(differentiate_chunk, (zeros, bias_zeros), pieces)
        # Each rank has the contribution of its columns to the gradient of hidden states: reduced over `rows`.
        hidden_gradient = specs.sum_into_residual(chunks.join(hidden_gradient, hidden_BSH.shape))
        # Manual axes are not among `samples`: over these the step reduces gradients itself (`param_comm`).
        bias_gradient = None if bias_gradient is None else psum_varying(bias_gradient, specs.samples)
        return hidden_gradient, psum_varying(table_gradient, specs.samples), bias_gradient

    with jax.named_scope("loss"):
        parameters, tokens = (specs.hidden, specs.table, specs.bias), (specs.tokens,) * 3
        return *map_ranks(local, (*parameters, *tokens), parameters)(*saved, gradient), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def logit_gradient(
    options: LossOptions, logits_CV: Array, column_V: Array, labels_C: Array, log_z_C: Array, gradient_C: Array
) -> Array:
    """Computes the gradient of the products with the table, float32 [C, V].

    With e = label_smoothing, p = softmax(logits), g the gradient of a token's loss:
    `d loss / d logits = g (p (1 + 2 z_loss log Z) - (1 - e) onehot(label) - e / vocab_size)`.
    """
    # The derivative of z_loss (log Z)^2 is 2 z_loss log Z times that of log Z, which is the probability.
    z_term = 1 + 2 * options.z_loss * log_z_C
    slope = jnp.exp(logits_CV - log_z_C[:, None]) * z_term[:, None]
    slope -= (column_V == labels_C[:, None]) * (1 - options.label_smoothing)
    slope -= options.label_smoothing / options.vocab_size
    slope = options.gradient(slope * gradient_C[:, None], logits_CV)
    # Rows past the vocabulary have probability 0, but the smoothed target would give them a gradient.
    return jnp.where(column_V < options.vocab_size, slope, 0)


def add_chunk(
    sums: tuple[Array, Array | None], slope_CV: Array, hidden_CH: Array, table_VH: Array
) -> tuple[tuple[Array, Array | None], Array]:
    """Adds a chunk to the float32 gradients of table and bias, from the gradient [C, V] of its products with the table;
    returns these sums, and the gradient [C, H] of the chunk's hidden states."""
    of_table_VH, of_bias_V = sums
    of_bias_V = None if of_bias_V is None else of_bias_V + slope_CV.sum(0)
    # Both products are in the compute type; the table's gradient is summed over chunks in float32.
    slope_CV = slope_CV.astype(hidden_CH.dtype)
    of_table_VH += lax.dot_general(slope_CV, hidden_CH, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (of_table_VH, of_bias_V), slope_CV @ table_VH


class Summaries(NamedTuple):
    """Of each token's logits, float32 [B, S]: the maximum, the sum of exp(logit - maximum), the label's logit, and with
    label smoothing the sum of logits."""

    maximum: Array
    exponentials: Array
    label: Array
    logit_sum: Array | None


def summaries_of(
    specs: VocabSpecs, options: LossOptions, hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array
) -> Summaries:
    """Summarizes each token's logits, inside the map.

    Communication: a maximum, and one all-reduce of two or three numbers per token, over the ranks of `rows`.
    """
    hidden_BSH = specs.gather_hidden(hidden_BSH)
    chunks, table_VH = TokenChunks.of(hidden_BSH, options.chunk), table_VH.astype(hidden_BSH.dtype)

    def reduce_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, ...]]:
        """Summarizes the logits of a chunk of tokens over this rank's rows."""
        hidden_CH, labels_C = chunk
        logits_CV, column_V = local_logits(specs, hidden_CH, table_VH, bias_V, options)
        # An online softmax over ranks: each has the maximum and the sum of exponentials of its columns.
        highest = logits_CV.max(-1)
        exponentials = jnp.exp(logits_CV - highest[:, None]).sum(-1)
        # One rank has the label's row; the others contribute 0 to the sum.
        row, owned = local_rows(specs, labels_C, table_VH.shape[0])
        label = jnp.where(owned, jnp.take_along_axis(logits_CV, row[:, None], axis=1)[:, 0], 0)
        return None, (highest, exponentials, label, sum_of_real(logits_CV, column_V, options))

    _, summaries = lax.scan(reduce_chunk, None, (chunks.split(hidden_BSH), chunks.split(labels_BS)))
    highest, exponentials, label, total = (chunks.join(a, labels_BS.shape) for a in summaries)
    # sum exp(z - top) = sum over ranks of exp(highest - top) * (their sum exp(z - highest))
    # `pmax` has no derivative, and needs none: losses have backward passes of their own.
    top = lax.pmax(highest, specs.rows)
    partial_sums = (exponentials * jnp.exp(highest - top), label) + ((total,) if options.label_smoothing else ())
    # XLA: separate all-reduces may be moved after the mean over tokens. One array is reduced here.
    exponentials, label, *totals = lax.psum(jnp.stack(partial_sums), specs.rows)
    return Summaries(top, exponentials, label, totals[0] if totals else None)


def local_logits(
    specs: VocabSpecs,
    hidden_CH: Array,
    table_VH: Array,
    bias_V: Array | None,
    options: OutputOptions,
    scales_V: Array | None = None,
) -> tuple[Array, Array]:
    """Computes the logits of this rank's vocabulary rows, inside the map.

    The rows are in the type of `hidden_CH`; `scales_V` are those of an 8-bit table, whose values are in `table_VH`.

    Returns:
      float32 logits [C, V], `PADDING_LOGIT` for rows past the vocabulary; and the index of each column in the entire
      vocabulary, [V].
    """
    # Sums of exponentials over the vocabulary need float32; the operands stay in the compute type.
    logits_CV = lax.dot_general(hidden_CH, table_VH, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    logits_CV = logits_CV if scales_V is None else logits_CV * scales_V
    logits_CV, vocab_size = options.logits(logits_CV, bias_V), options.vocab_size
    rows = table_VH.shape[0]
    column_V = lax.axis_index(specs.rows) * rows + jnp.arange(rows)
    # Padding is at the end of the last rank's rows: only columns that may be padding are overwritten.
    # XLA: on CPUs, a `where` over all columns would write all logits twice.
    start = max(0, vocab_size - (lax.axis_size(specs.rows) - 1) * rows)
    if start < rows:
        tail = jnp.where(column_V[start:] < vocab_size, logits_CV[:, start:], PADDING_LOGIT)
        logits_CV = lax.dynamic_update_slice_in_dim(logits_CV, tail, start, axis=1)
    return logits_CV, column_V


def sum_of_real(logits_CV: Array, column_V: Array, options: LossOptions) -> Array:
    """Sums the logits that are not padding, for label smoothing: [C]."""
    if not options.label_smoothing:
        return varying_like(jnp.zeros(logits_CV.shape[:1]), logits_CV)  # not read, but a scan returns arrays
    return jnp.where(column_V < options.vocab_size, logits_CV, 0).sum(-1)
