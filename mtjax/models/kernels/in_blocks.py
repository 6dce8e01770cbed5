"""XLA's attention with the scores of a few queries at a time: memory is linear in the sequence, on any device."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtjax.layout.attention_kernel import queries_at_a_time, spans_of
from mtjax.models.alibi import Alibi
from mtjax.models.kernels.blocks import XlaBlocks, attend_across, dropout_of
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.layer_loop import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.sharding.context.block_attention import DropoutState, KVBlock, QueryBlock
from mtjax.sharding.flash import flash_attention


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
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
    # An array: with layers of several windows it is selected by the layer's number, and traced.
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
        kernel = self._kernel(query, key)
        # Unrolled, as spans have different numbers of keys.
        parts = [kernel.forward(*span, more.dropout, self.is_causal) for span in self._spans(queries, keys)]
        mixed, log_sums = (jnp.concatenate(each, 1) for each in zip(*parts, strict=True))
        return mixed, log_sums.swapaxes(1, 2)

    def backward(
        self, inputs: tuple[Array, Array, Array], more: Inputs, out: Array, statistics: Array, gradient: Array
    ) -> tuple[Array, ...]:
        """See `FlashKernel`."""
        query, key, value = inputs
        queries, keys = _blocks(query, key, value, more)
        rows = queries._replace(mixed=out, log_sums=statistics.swapaxes(1, 2), gradient=gradient)
        kernel, spans = self._kernel(query, key), self._spans(rows, keys)
        # The last span has all keys, so its gradients have the full length, to which the others are added.
        last, d_key, d_value, *largest = kernel.backward(*spans[-1], more.dropout, self.is_causal)
        of_rows = [(last, *largest)]
        for span in reversed(spans[:-1]):
            d_rows, *of_keys = kernel.backward(*span, more.dropout, self.is_causal)
            of_rows.insert(0, (d_rows, *of_keys[2:]))
            of_both = zip((d_key, d_value), of_keys[:2], strict=True)
            d_key, d_value = (a + _lengthened(b, a.shape[1]) for a, b in of_both)
        d_query, *largest = (jnp.concatenate(parts, 1) for parts in zip(*of_rows, strict=True))
        gradients = (a.astype(b.dtype) for a, b in zip((d_query, d_key, d_value), inputs, strict=True))
        return *gradients, *(a.swapaxes(1, 2) for a in largest)

    def _spans(self, queries: QueryBlock, keys: KVBlock) -> list[tuple[QueryBlock, KVBlock]]:
        """Divides causal samples into spans, each with the keys up to its end."""
        length = queries.query.shape[1]
        count = spans_of(length, self._at_a_time(queries.query, keys.key)) if self.is_causal else 1
        step, spans = length // count, []
        for end in range(step, length + 1, step):
            queries_of_block = jax.tree.map(partial(_between, end - step, end), queries)
            spans.append((queries_of_block, jax.tree.map(partial(_between, 0, end), keys)))
        return spans

    def _at_a_time(self, query: Array, key: Array) -> int:
        return queries_at_a_time(query.shape[0] * query.shape[2], key.shape[1])

    def _kernel(self, query: Array, key: Array) -> XlaBlocks:
        at_a_time = self._at_a_time(query, key)
        return XlaBlocks(self.scale, self.rate, key.shape[1], self.softcap, self.alibi, at_a_time, self.observes)


def _between(start: int, end: int, a: Array) -> Array:
    return a[:, start:end]


def _lengthened(a: Array, length: int) -> Array:
    """Adds zeros after the tokens of [batch, seq, ...]."""
    return jnp.pad(a, [(0, 0), (0, length - a.shape[1])] + [(0, 0)] * (a.ndim - 2))


def _blocks(query: Array, key: Array, value: Array, more: Inputs) -> tuple[QueryBlock, KVBlock]:
    """Returns the queries and keys of entire samples."""
    positions = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    first = None if more.window is None else positions - (more.window - 1)
    slopes = None if more.slopes is None else jnp.broadcast_to(more.slopes, query.shape[:3])
    queries = QueryBlock(query, positions, more.segments, first, slopes)
    return queries, KVBlock(key, value, positions, more.segments)
