"""Cross-entropy beside a teacher's probabilities, over a vocabulary that is split over the mesh (arXiv 1503.02531).

As in `mtjax.sharding.vocab`, logits - here the student's and the teacher's - exist for one chunk of tokens at a time,
on the rank that computed them: two maxima and five sums are sent per token. Shape suffixes are those of that module; W
is the width of the teacher's hidden states.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.sharding.axes import psum_varying, varying_like
from mtjax.sharding.vocab import Chunks, LossOptions, VocabSpecs, local_logits, local_rows, map_ranks


def vocab_parallel_distillation(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    teacher_hidden: Float[Array, "batch seq width"],
    teacher_table: Float[Array, "vocab width"],
    options: LossOptions,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Losses of each token by its label and by a teacher's probabilities, without gathering logits.

    With T = options.temperature, z the student's logits `hidden @ table.T` and t the teacher's: the cross-entropy of
    softmax(z) against the label, and T^2 KL(softmax(t / T) || softmax(z / T)), whose gradients don't shrink with T.

    Args:
      hidden: [batch, act_seq, embed] in the compute type; products accumulate in float32.
      table: [vocab, embed], float32, rows split over `model`.
      labels: ids in [0, vocab_size).
      teacher_hidden: [batch, seq, width], whole sequences on every model rank; it has no gradient.
      teacher_table: [vocab, width], its rows split as the student's; it has no gradient.
      options: vocabulary size, chunk length and temperature; smoothing and z-loss have no part in it.

    Returns:
      Both losses in float32. Weight and sum them; a token of weight 0 has no gradient.
    """
    return _losses(VocabSpecs.in_force(), options, hidden, table, labels, teacher_hidden, teacher_table)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(places: VocabSpecs, options: LossOptions, *arguments: Array) -> tuple[Array, Array]:
    return _forward(places, options, *arguments)[0]


def _forward(places: VocabSpecs, options: LossOptions, *arguments: Array) -> tuple[tuple[Array, Array], Any]:
    temperature = options.temperature

    def local(*own: Array) -> tuple[Array, ...]:
        (top, teacher_top), (scale, soft_scale, teacher_scale, apart, target) = _summaries(places, options, *own)
        log_z = jnp.log(scale) + top
        log_soft = jnp.log(soft_scale) + top / temperature
        log_teacher = jnp.log(teacher_scale) + teacher_top / temperature
        divergence = apart / teacher_scale / temperature - log_teacher + log_soft
        return log_z - target, temperature**2 * divergence, log_z, log_soft, log_teacher

    with jax.named_scope("loss"):
        hard, soft, *logs = map_ranks(local, _specs(places), (places.tokens,) * 5)(*arguments)
        return (hard, soft), (*arguments, *logs)


def _backward(
    places: VocabSpecs, options: LossOptions, saved: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    temperature = options.temperature

    def local(hidden_BSH: Array, table_VH: Array, *rest: Array) -> tuple[Array, Array]:
        labels_BS, teacher_BSW, teacher_VW, *tokenwise = rest
        hidden_BSH = places.gather_sequence(hidden_BSH)  # again: only the split one is kept
        chunks = Chunks.of(hidden_BSH, options.chunk)
        cast_VH, teacher_VW = table_VH.astype(hidden_BSH.dtype), teacher_VW.astype(teacher_BSW.dtype)

        def differentiate_chunk(table_gradient_VH: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
            hidden_CH, teacher_CW, labels_C, *of_tokens = chunk
            log_z, log_soft, log_teacher, hard, soft = (a[:, None] for a in of_tokens)
            logits_CV, column_V = local_logits(places, hidden_CH, cast_VH, None, options.vocab_size)
            teacher_CV, _ = local_logits(places, teacher_CW, teacher_VW, None, options.vocab_size)
            slope = hard * (jnp.exp(logits_CV - log_z) - (column_V == labels_C[:, None]))
            apart = jnp.exp(logits_CV / temperature - log_soft) - jnp.exp(teacher_CV / temperature - log_teacher)
            slope = jnp.where(column_V < options.vocab_size, slope + soft * temperature * apart, 0)
            slope = slope.astype(hidden_CH.dtype)
            table_gradient_VH += lax.dot_general(
                slope, hidden_CH, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return table_gradient_VH, slope @ cast_VH

        zeros = varying_like(jnp.zeros(table_VH.shape, jnp.float32), hidden_BSH, table_VH, *rest)
        pieces = tuple(chunks.split(a) for a in (hidden_BSH, teacher_BSW, labels_BS, *tokenwise))
        table_gradient, hidden_gradient = lax.scan(differentiate_chunk, zeros, pieces)
        hidden_gradient = places.sum_into_residual(chunks.join(hidden_gradient, hidden_BSH.shape))
        return hidden_gradient, psum_varying(table_gradient, places.samples)

    with jax.named_scope("loss"):
        specs = (*_specs(places), *(places.tokens,) * 5)
        hidden, table = map_ranks(local, specs, (places.hidden, places.table))(*saved, *gradients)
        return hidden, table, None, None, None


_losses.defvjp(_forward, _backward)


def _specs(places: VocabSpecs) -> tuple[PartitionSpec, ...]:
    return places.hidden, places.table, places.tokens, PartitionSpec(*places.tokens, None), places.table


def _summaries(
    places: VocabSpecs,
    options: LossOptions,
    hidden_BSH: Array,
    table_VH: Array,
    labels_BS: Array,
    teacher_BSW: Array,
    teacher_VW: Array,
) -> tuple[Array, Array]:
    """What is known of each token's logits without gathering them, inside the map.

    [2, B, S]: the largest of the student's and of the teacher's; and [5, B, S]: the sums of the student's exponentials
    below it, of those by the temperature, of the teacher's; of the teacher's times how far it is above the student; and
    the label's logit.
    """
    hidden_BSH = places.gather_sequence(hidden_BSH)
    chunks = Chunks.of(hidden_BSH, options.chunk)
    table_VH, teacher_VW = table_VH.astype(hidden_BSH.dtype), teacher_VW.astype(teacher_BSW.dtype)

    def reduce_chunk(_: None, chunk: tuple[Array, ...]) -> tuple[None, tuple[Array, ...]]:
        hidden_CH, teacher_CW, labels_C = chunk
        logits_CV = local_logits(places, hidden_CH, table_VH, None, options.vocab_size)[0]
        teacher_CV = local_logits(places, teacher_CW, teacher_VW, None, options.vocab_size)[0]
        highest, teachers_highest = logits_CV.max(-1), teacher_CV.max(-1)
        below = logits_CV - highest[:, None]
        teachers = jnp.exp((teacher_CV - teachers_highest[:, None]) / options.temperature)
        apart = (teachers * (teacher_CV - logits_CV)).sum(-1)
        row, owned = local_rows(places, labels_C, table_VH.shape[0])
        target = jnp.where(owned, jnp.take_along_axis(logits_CV, row[:, None], axis=1)[:, 0], 0)
        scales = jnp.exp(below).sum(-1), jnp.exp(below / options.temperature).sum(-1), teachers.sum(-1)
        return None, (highest, teachers_highest, *scales, apart, target)

    pieces = chunks.split(hidden_BSH), chunks.split(teacher_BSW), chunks.split(labels_BS)
    _, parts = lax.scan(reduce_chunk, None, pieces)
    highest, teachers_highest, *sums, target = (chunks.join(part, labels_BS.shape) for part in parts)
    own_tops = jnp.stack((highest, teachers_highest))
    tops = lax.pmax(own_tops, places.rows)
    student, teacher = own_tops - tops
    below = jnp.stack((student, student / options.temperature, *(teacher / options.temperature,) * 2))
    return tops, lax.psum(jnp.concatenate((jnp.stack(sums) * jnp.exp(below), target[None])), places.rows)
