"""Vocabulary-parallel distillation: losses with labels and with a teacher's probabilities (arXiv 1503.02531).

As in `mtjax.sharding.vocab`, logits - here the student's and the teacher's - exist for one chunk of tokens at a time,
on the rank that computed them: two maxima and five sums are reduced per token. Shape suffixes are those of that module;
W is the width of the teacher's hidden states.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.sharding.axes import map_ranks, psum_varying, varying_like
from mtjax.sharding.token_chunks import TokenChunks
from mtjax.sharding.vocab import LossOptions, VocabSpecs, add_chunk, local_logits, local_rows


def vocab_parallel_distillation(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    teacher_hidden: Float[Array, "batch seq width"],
    teacher_table: Float[Array, "vocab width"],
    options: LossOptions,
    bias: Float[Array, " vocab"] | None = None,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Computes each token's losses by its label and by a teacher's probabilities, without gathering logits.

    With T = options.temperature, z the student's logits `hidden @ table.T + bias` and t the teacher's: the
    cross-entropy of softmax(z) against the label, and T^2 KL(softmax(t / T) || softmax(z / T)), whose gradients don't
    shrink with T.

    Args:
      hidden: [batch, act_seq, embed] in the compute type; products accumulate in float32.
      table: [vocab, embed], float32, rows sharded over `model`.
      labels: ids in [0, vocab_size).
      teacher_hidden: [batch, seq, width], replicated over `model`; it has no gradient.
      teacher_table: [vocab, width], its rows sharded like the student's; it has no gradient.
      options: vocabulary size, chunk length and temperature, and the factor and soft cap of both models' logits;
        smoothing and z-loss are not used.
      bias: [vocab], float32, of the student's logits, if any.

    Returns:
      Both losses, float32 [batch, seq], to be weighted and summed; a token of weight 0 has no gradient.
    """
    return _losses(VocabSpecs.in_force(), options, hidden, table, bias, labels, teacher_hidden, teacher_table)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(specs: VocabSpecs, options: LossOptions, *arguments: Array | None) -> tuple[Array, Array]:
    return _forward(specs, options, *arguments)[0]


def _forward(specs: VocabSpecs, options: LossOptions, *arguments: Array | None) -> tuple[tuple[Array, Array], Any]:
    """Computes both losses, [batch, seq]; the residuals are the arguments and three log Z, [batch, seq] each.

    With q = softmax(t / T): `KL = sum q (t - z) / T - log Z(t / T) + log Z(z / T)`.
    """
    temperature = options.temperature

    def local(*arrays: Array) -> tuple[Array, ...]:
        """Computes losses and log Z of this rank's tokens, inside the map."""
        (top, teacher_top), (scale, soft_scale, teacher_scale, difference, target) = _summaries(specs, options, *arrays)
        log_z = jnp.log(scale) + top
        # The maximum of z / T is that of z, divided by T: one maximum serves both softmaxes of the student.
        log_soft = jnp.log(soft_scale) + top / temperature
        log_teacher = jnp.log(teacher_scale) + teacher_top / temperature
        divergence = difference / teacher_scale / temperature - log_teacher + log_soft
        return log_z - target, temperature**2 * divergence, log_z, log_soft, log_teacher

    with jax.named_scope("loss"):
        hard, soft, *logs = map_ranks(local, _specs(specs), (specs.tokens,) * 5)(*arguments)
        return (hard, soft), (*arguments, *logs)


def _backward(
    specs: VocabSpecs, options: LossOptions, saved: Any, gradients: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    """Recomputes logits chunk by chunk, and from them the gradients of hidden states and table.

    With g and h the gradients of a token's two losses:
    `d / d z = g (softmax(z) - onehot(label)) + h T (softmax(z / T) - softmax(t / T))`.

    Args:
      specs: shardings.
      options: of the losses.
      saved: hidden [batch, act_seq, embed], table [vocab, embed], bias [vocab] or None, labels [batch, seq], teacher's
        hidden states [batch, seq, width] and table [vocab, width], and three log Z [batch, seq].
      gradients: of both losses, float32 [batch, seq].

    Returns:
      Gradients of hidden, table and bias; None for the other arguments.
    """
    temperature = options.temperature

    def local(
        hidden_BSH: Array, table_VH: Array, bias_V: Array | None, *arrays: Array
    ) -> tuple[Array, Array, Array | None]:
        """Computes the gradients of this rank's hidden states, table rows and biases, inside the map."""
        labels_BS, teacher_BSW, teacher_VW, *tokenwise = arrays
        hidden_BSH = specs.gather_hidden(hidden_BSH)  # recomputed: only the sharded one is saved
        chunks = TokenChunks.of(hidden_BSH, options.chunk)
        cast_VH, teacher_VW = table_VH.astype(hidden_BSH.dtype), teacher_VW.astype(teacher_BSW.dtype)

        def differentiate_chunk(sums: tuple[Array, Array | None], chunk: tuple[Array, ...]) -> tuple[Any, Array]:
            """Adds a chunk to the gradients of table and bias; returns that of its hidden states [C, H]."""
            hidden_CH, teacher_CW, labels_C, *of_tokens = chunk
            log_z, log_soft, log_teacher, hard, soft = (a[:, None] for a in of_tokens)
            logits_CV, column_V = local_logits(specs, hidden_CH, cast_VH, bias_V, options)
            teacher_CV, _ = local_logits(specs, teacher_CW, teacher_VW, None, options)
            # `slope` is d loss / d logits, [C, V]: the formula above, term by term.
            slope = hard * (jnp.exp(logits_CV - log_z) - (column_V == labels_C[:, None]))
            difference = jnp.exp(logits_CV / temperature - log_soft) - jnp.exp(teacher_CV / temperature - log_teacher)
            slope = options.gradient(slope + soft * temperature * difference, logits_CV)
            # Padding of the vocabulary has no gradient.
            slope = jnp.where(column_V < options.vocab_size, slope, 0)
            return add_chunk(sums, slope, hidden_CH, cast_VH)

        like, zeros = (hidden_BSH, table_VH, *arrays), partial(jnp.zeros, dtype=jnp.float32)
        sums = jax.tree.map(lambda a: varying_like(zeros(a.shape), *like), (table_VH, bias_V))
        pieces = tuple(chunks.split(a) for a in (hidden_BSH, teacher_BSW, labels_BS, *tokenwise))
        (table_gradient, bias_gradient), hidden_gradient = lax.scan(differentiate_chunk, sums, pieces)
        hidden_gradient = specs.sum_into_residual(chunks.join(hidden_gradient, hidden_BSH.shape))
        bias_gradient = None if bias_gradient is None else psum_varying(bias_gradient, specs.samples)
        return hidden_gradient, psum_varying(table_gradient, specs.samples), bias_gradient

    with jax.named_scope("loss"):
        in_specs = (*_specs(specs), *(specs.tokens,) * 5)
        parameters = (specs.hidden, specs.table, specs.bias)
        return *map_ranks(local, in_specs, parameters)(*saved, *gradients), None, None, None


_losses.defvjp(_forward, _backward)


def _specs(specs: VocabSpecs) -> tuple[PartitionSpec, ...]:
    return specs.hidden, specs.table, specs.bias, specs.tokens, PartitionSpec(*specs.tokens, None), specs.table


def _summaries(
    specs: VocabSpecs,
    options: LossOptions,
    hidden_BSH: Array,
    table_VH: Array,
    bias_V: Array | None,
    labels_BS: Array,
    teacher_BSW: Array,
    teacher_VW: Array,
) -> tuple[Array, Array]:
    """Summarizes each token's logits, inside the map; one maximum and one all-reduce over the ranks with the same rows.

    Returns:
      [2, B, S]: the maxima of the student's logits z and the teacher's t. [5, B, S]: with z and t relative to their
      maxima, the sums of exp(z), exp(z / T), exp(t / T) and exp(t / T) (t - z), the last difference not relative; and
      the label's logit.
    """
    hidden_BSH = specs.gather_hidden(hidden_BSH)
    chunks = TokenChunks.of(hidden_BSH, options.chunk)
    table_VH, teacher_VW = table_VH.astype(hidden_BSH.dtype), teacher_VW.astype(teacher_BSW.dtype)

    def reduce_chunk(_: None, chunk: tuple[Array, ...]) -> tuple[None, tuple[Array, ...]]:
        """Summarizes the logits of a chunk of tokens over this rank's rows."""
        hidden_CH, teacher_CW, labels_C = chunk
        logits_CV = local_logits(specs, hidden_CH, table_VH, bias_V, options)[0]
        teacher_CV = local_logits(specs, teacher_CW, teacher_VW, None, options)[0]
        highest, teacher_highest = logits_CV.max(-1), teacher_CV.max(-1)
        below = logits_CV - highest[:, None]
        teacher_exp = jnp.exp((teacher_CV - teacher_highest[:, None]) / options.temperature)
        # Not relative to the maxima: the difference is finite, and its factor is 0 where the teacher's logit is far
        # below.
        difference = (teacher_exp * (teacher_CV - logits_CV)).sum(-1)
        row, owned = local_rows(specs, labels_C, table_VH.shape[0])
        # One rank has the label's row; the others add 0 in the all-reduce below.
        target = jnp.where(owned, jnp.take_along_axis(logits_CV, row[:, None], axis=1)[:, 0], 0)
        scales = jnp.exp(below).sum(-1), jnp.exp(below / options.temperature).sum(-1), teacher_exp.sum(-1)
        return None, (highest, teacher_highest, *scales, difference, target)

    pieces = chunks.split(hidden_BSH), chunks.split(teacher_BSW), chunks.split(labels_BS)
    _, summaries = lax.scan(reduce_chunk, None, pieces)
    highest, teacher_highest, *sums, target = (chunks.join(a, labels_BS.shape) for a in summaries)
    # Sums relative to a rank's maximum become relative to the global one: a factor of exp(local maximum - global).
    local_tops = jnp.stack((highest, teacher_highest))
    tops = lax.pmax(local_tops, specs.rows)
    student, teacher = local_tops - tops
    below = jnp.stack((student, student / options.temperature, *(teacher / options.temperature,) * 2))
    # One all-reduce for all six: small arrays take a collective's latency.
    return tops, lax.psum(jnp.concatenate((jnp.stack(sums) * jnp.exp(below), target[None])), specs.rows)
