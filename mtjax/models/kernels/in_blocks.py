"""XLA's attention with the scores of a few queries at a time: memory is linear in the sequence, on any device."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtjax.layout.attention_kernel import queries_at_a_time
from mtjax.models.alibi import Alibi
from mtjax.models.kernels.blocks import XlaBlocks, attend_across, dropout_of
from mtjax.models.kernels.options import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.recompute import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.sharding.context.block_attention import DropoutState, KVBlock, QueryBlock
from mtjax.sharding.flash import flash_attention


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups value_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads value_dim"]:
    """Computes self-attention, without a bias: `mtjax.layout.attention_kernel` chooses it for no other models."""
    assert context.bias is None
    if context.positions is not None:
        return attend_across("xla", query, key, value, context, options)
    scale = options.scale_of(query.shape[-1])
    observes = options.largest_scores is not None
    kernel = InBlocks(scale, context.is_causal, options.softcap, options.alibi, options.rate, observes)
    window = None if options.window is None else jnp.asarray(options.window)
    slopes = None if options.alibi is None else options.alibi.by_head()
    inputs = Inputs(context.segment_ids, window, slopes, dropout_of(query, context, options))
    names = (ATTENTION_OUTPUT, ATTENTION_STATISTICS)
    return flash_attention(query, key, value, names, kernel, inputs, options.sinks, options.largest_scores)


class Inputs(NamedTuple):
    """What else scores depend on."""

    segments: Int[Array, "batch seq"] | None
    window: Int[Array, ""] | None
    slopes: Float[Array, " heads"] | None
    dropout: DropoutState | None


@dataclass(frozen=True)
class InBlocks:
    """`XlaBlocks` of a few queries and all keys; a `FlashKernel` whose statistics are log-sums."""

    scale: float
    is_causal: bool
    softcap: float | None
    alibi: Alibi | None
    rate: float
    """Of the dropout on probabilities."""
    observes: bool
    """Whether `backward` also returns each row's largest score."""

    def __call__(self, query: Array, key: Array, value: Array, more: Inputs) -> Array:
        """See `FlashKernel`."""
        return self.forward(query, key, value, more)[0]

    def forward(self, query: Array, key: Array, value: Array, more: Inputs) -> tuple[Array, Array]:
        """See `FlashKernel`."""
        queries, keys = _blocks(query, key, value, more)
        mixed, log_sums = self._kernel(query, key).forward(queries, keys, more.dropout, self.is_causal)
        return mixed, log_sums.swapaxes(1, 2)

    def backward(
        self, inputs: tuple[Array, Array, Array], more: Inputs, out: Array, statistics: Array, gradient: Array
    ) -> tuple[Array, ...]:
        """See `FlashKernel`."""
        query, key, value = inputs
        queries, keys = _blocks(query, key, value, more)
        rows = queries._replace(mixed=out, log_sums=statistics.swapaxes(1, 2), gradient=gradient)
        gradients = self._kernel(query, key).backward(rows, keys, more.dropout, self.is_causal)
        of_inputs = (a.astype(b.dtype) for a, b in zip(gradients[:3], inputs, strict=True))
        return *of_inputs, *(rows.swapaxes(1, 2) for rows in gradients[3:])

    def _kernel(self, query: Array, key: Array) -> XlaBlocks:
        rows = query.shape[0] * query.shape[2]
        at_a_time = queries_at_a_time(rows, key.shape[1])
        return XlaBlocks(self.scale, self.rate, key.shape[1], self.softcap, self.alibi, at_a_time, self.observes)


def _blocks(query: Array, key: Array, value: Array, more: Inputs) -> tuple[QueryBlock, KVBlock]:
    """Returns the queries and keys of entire samples."""
    positions = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    first = None if more.window is None else positions - (more.window - 1)
    slopes = None if more.slopes is None else jnp.broadcast_to(more.slopes, query.shape[:3])
    queries = QueryBlock(query, positions, more.segments, first, slopes)
    return queries, KVBlock(key, value, positions, more.segments)
