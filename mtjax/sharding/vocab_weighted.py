"""The weighted sum of a cross-entropy whose gradients are computed with its values, while a chunk's logits are alive.

Of the sum's gradients only a factor is unknown in the forward pass: that of the sum itself. So logits are not
recomputed in the backward pass as in `mtjax.sharding.vocab`: three products with the table instead of four. It needs
all columns of a token's logits on one rank: no tensor parallelism.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.sharding.axes import map_ranks, psum_varying, varying_like
from mtjax.sharding.token_chunks import TokenChunks
from mtjax.sharding.vocab import (
    LossOptions,
    VocabSpecs,
    add_chunk,
    local_logits,
    logit_gradient,
    sum_of_real,
    vocab_parallel_cross_entropy,
)


def weighted_cross_entropy(
    hidden: Float[Array, "batch act_seq embed"],
    table: Float[Array, "vocab embed"],
    labels: Int[Array, "batch seq"],
    weights: Float[Array, "batch seq"],
    options: LossOptions,
    bias: Float[Array, " vocab"] | None = None,
) -> Float[Array, ""]:
    """Computes the sum of `vocab_parallel_cross_entropy` times `weights`, which have no gradient.

    Its arguments are those of that function; the table's rows and the sequences of `hidden` are not sharded.
    """
    specs = VocabSpecs.in_force()
    assert not specs.residual_sharding[1]
    return _weighted(specs, options, hidden, table, bias, labels, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted(
    specs: VocabSpecs,
    options: LossOptions,
    hidden: Array,
    table: Array,
    bias: Array | None,
    labels: Array,
    weights: Array,
) -> Array:
    """Computes the weighted sum of the losses of `hidden` [batch, act_seq, embed], a scalar."""
    # Without a gradient, logits are computed once in any case.
    return (vocab_parallel_cross_entropy(hidden, table, labels, options, bias) * weights).sum()


def _weighted_forward(
    specs: VocabSpecs,
    options: LossOptions,
    hidden: Array,
    table: Array,
    bias: Array | None,
    labels: Array,
    weights: Array,
) -> tuple[Array, Any]:
    """Computes the sum; the residuals are its gradients by hidden states, table and bias."""

    def local(
        hidden_BSH: Array, table_VH: Array, bias_V: Array | None, labels_BS: Array, weights_BS: Array
    ) -> tuple[Array, Array, Array, Array | None]:
        """Computes weighted losses and gradients of this rank's tokens, inside the map."""
        chunks, cast_VH = TokenChunks.of(hidden_BSH, options.chunk), table_VH.astype(hidden_BSH.dtype)

        def chunk(sums: tuple[Array, Array | None], chunk: tuple[Array, ...]) -> tuple[Any, tuple[Array, Array]]:
            """Adds a chunk to the gradients of table and bias; returns its losses [C] and their gradient [C, H]."""
            hidden_CH, labels_C, weights_C = chunk
            logits_CV, column_V = local_logits(specs, hidden_CH, cast_VH, bias_V, options)
            # No collective: this rank has all columns.
            log_z_C = jax.nn.logsumexp(logits_CV, axis=-1)
            target_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=1)[:, 0]
            loss_C = log_z_C - (1 - options.label_smoothing) * target_C + options.z_loss * log_z_C**2
            if options.label_smoothing:
                total_C = sum_of_real(logits_CV, column_V, options)
                loss_C -= options.label_smoothing * total_C / options.vocab_size
            # While the chunk's logits are alive: in the backward pass only a factor is left to multiply by.
            slope = logit_gradient(options, logits_CV, column_V, labels_C, log_z_C, weights_C)
            sums, of_hidden_CH = add_chunk(sums, slope, hidden_CH, cast_VH)
            return sums, (loss_C * weights_C, of_hidden_CH)

        like = (hidden_BSH, table_VH, labels_BS, weights_BS)
        zeros = varying_like(jnp.zeros(table_VH.shape, jnp.float32), *like)
        bias_zeros = None if bias_V is None else varying_like(jnp.zeros(bias_V.shape, jnp.float32), *like)
        pieces = tuple(chunks.split(a) for a in (hidden_BSH, labels_BS, weights_BS))
        (of_table, of_bias), (losses, of_hidden) = lax.scan(chunk, (zeros, bias_zeros), pieces)
        of_bias = None if of_bias is None else psum_varying(of_bias, specs.samples)
        losses, of_hidden = chunks.join(losses, labels_BS.shape), chunks.join(of_hidden, hidden_BSH.shape)
        # One rank has all rows; `shard_map` needs the sums over it as a proof.
        losses = lax.psum(losses, specs.rows) if specs.rows else losses
        return losses, specs.sum_into_residual(of_hidden), psum_varying(of_table, specs.samples), of_bias

    with jax.named_scope("loss"):
        parameters, tokens = (specs.hidden, specs.table, specs.bias), specs.tokens
        mapped = map_ranks(local, (*parameters, tokens, tokens), (tokens, *parameters))
        losses, *gradients = mapped(hidden, table, bias, labels, weights)
        return losses.sum(), gradients


def _weighted_backward(specs: VocabSpecs, options: LossOptions, gradients: list[Any], of_sum: Array) -> tuple[Any, ...]:
    """Multiplies the gradients by that of the sum; None for labels and weights."""
    del specs, options
    return *jax.tree.map(lambda gradient: (gradient * of_sum).astype(gradient.dtype), gradients), None, None


_weighted.defvjp(_weighted_forward, _weighted_backward)
