"""Attention across context parallel ranks: each runs `RingAttention` for its heads, forward and backward."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float

from mtjax.sharding.axes import context_axes, map_ranks, no_hoist, spec, varying_like
from mtjax.sharding.context.block_attention import BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.context.ring_attention import Method, RingAttention
from mtjax.sharding.sinks import gradient_of_sinks, with_sinks

Tree = Any


def context_attention(
    kernel: BlockKernel,
    method: Method,
    is_causal: bool,
    queries: QueryBlock,
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    dropout: DropoutState | None,
    names: tuple[str, str],
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes softmax attention to the tokens of all context parallel ranks.

    Args:
      kernel: for a block of queries and a block of keys.
      method: how keys and values are sent to the queries.
      is_causal: whether tokens attend only to themselves and those before them.
      queries: this rank's; positions and the starts of windows are [seq], equal in all samples, and slopes [heads].
      key: this rank's; heads / kv_heads consecutive query heads share a key and a value head.
      value: this rank's, likewise.
      dropout: of dropout on probabilities, with the indices of all heads; None turns it off.
      names: of the arrays saved for the backward pass: the output, and float32 log-sums [batch, seq, heads].
      sinks: of each head, a logit added to the softmax's denominator.
    """
    # All that depends on the rules is read here: `_attend` is a custom_vjp, which jax may trace without them.
    (axis,) = context_axes()
    heads, statistics = spec("batch", "seq", "heads", "head_dim"), spec("batch", "seq", "heads")
    parallel = _ContextParallel(kernel, method, is_causal, axis, heads, statistics, spec("heads"), names)
    # The gradient that a custom_vjp returns has the type of its argument, and `gradient_of_sinks` varies over ranks.
    sinks = None if sinks is None else varying_like(sinks, queries.query)
    metadata = _Metadata(queries.positions, queries.segments, queries.first, queries.slopes, dropout)
    return _attend(parallel, queries.query, key, value, sinks, metadata)


class _Metadata(NamedTuple):
    """Arguments of `_attend` without gradients."""

    positions: Array
    segments: Array | None
    first: Array | None
    slopes: Array | None
    dropout: DropoutState | None


class _ContextParallel(NamedTuple):
    """Static arguments of `_attend`: kernel, mesh axis and shardings."""

    kernel: BlockKernel
    method: Method
    is_causal: bool
    axis: str
    heads: PartitionSpec
    statistics: PartitionSpec
    numbers: PartitionSpec
    """Of the heads' indices."""
    names: tuple[str, str]

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Maps `body` over the shards of (query, key, value, metadata, ...)."""

        def spec_of(a: Array) -> PartitionSpec:
            """[batch, seq, heads, head_dim] or [batch, seq, heads]; other arrays are replicated over `model`."""
            return {4: self.heads, 3: self.statistics}.get(a.ndim, PartitionSpec())

        def mapped(query: Array, key: Array, value: Array, metadata: _Metadata, *more: Array) -> Any:
            """Derives the specs of the arguments from their ranks, and calls the map."""
            metadata_specs = jax.tree.map(lambda a: PartitionSpec(), metadata)
            # Slopes and indices of heads are sharded as the heads are; every tensor parallel rank has all the rest.
            if metadata_specs.slopes is not None:
                metadata_specs = metadata_specs._replace(slopes=self.numbers)
            if metadata_specs.dropout is not None:
                metadata_specs = metadata_specs._replace(dropout=metadata_specs.dropout._replace(heads=self.numbers))
            specs = (*map(spec_of, (query, key, value)), metadata_specs, *map(spec_of, more))
            local = map_ranks(body, specs, outputs)
            with jax.named_scope("context"):
                return local(query, key, value, metadata, *more)

        return mapped

    def ring(
        self, query: Array, key: Array, value: Array, metadata: _Metadata
    ) -> tuple[RingAttention, QueryBlock, KVBlock]:
        """Builds a rank's ring attention, queries and keys, inside the map."""
        positions, segments, first, slopes, dropout = metadata
        # The index of its first chunk; `lax.axis_index` would be hoisted out of the scan over layers.
        rank = positions[0] // (len(positions) // 2)
        # `QueryBlock`'s arrays all begin with batch and sequence, so that pairs of chunks are cut and joined alike.
        batch_positions = jnp.broadcast_to(positions, query.shape[:2])
        if first is not None:
            first = jnp.broadcast_to(first, query.shape[:2])
        if slopes is not None:
            slopes = jnp.broadcast_to(slopes, query.shape[:3])
        ring = RingAttention(self.kernel, self.method, self.is_causal, self.axis, rank, dropout)
        return (
            ring,
            QueryBlock(query, batch_positions, segments, first, slopes),
            KVBlock(key, value, batch_positions, segments),
        )


def _forward(
    parallel: _ContextParallel, query: Array, key: Array, value: Array, sinks: Array | None, metadata: _Metadata
) -> tuple[Array, Array]:
    """Computes the output [batch, seq, heads, head_dim] and float32 log-sums [batch, seq, heads]."""

    def local(*arrays: Any) -> tuple[Array, Array]:
        ring, queries, keys = parallel.ring(*arrays)
        return ring.forward(queries, keys)

    mapped = parallel.map(local, (parallel.heads, parallel.statistics))
    output, log_sums = no_hoist(mapped, query, key, value, metadata)
    return (output, log_sums) if sinks is None else with_sinks(output, log_sums, sinks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    parallel: _ContextParallel, query: Array, key: Array, value: Array, sinks: Array | None, metadata: _Metadata
) -> Array:
    return _forward(parallel, query, key, value, sinks, metadata)[0]


def _attend_forward(
    parallel: _ContextParallel, query: Array, key: Array, value: Array, sinks: Array | None, metadata: _Metadata
) -> tuple[Array, Tree]:
    """Computes the output; the residuals are the arguments, the output and the log-sums."""
    # Named, so that recompute policies can save them: attention is then not recomputed in the backward pass.
    arrays = _forward(parallel, query, key, value, sinks, metadata)
    output, log_sums = (checkpoint_name(a, name) for a, name in zip(arrays, parallel.names, strict=True))
    return output, (query, key, value, sinks, metadata, output, log_sums)


def _attend_backward(
    parallel: _ContextParallel, saved: Tree, gradient: Array
) -> tuple[Array, Array, Array, Array | None, None]:
    """Runs the ring once more, for the gradients of query, key, value and sinks."""
    *inputs, sinks, metadata, output, log_sums = saved

    def local(*arrays: Any) -> tuple[Array, Array, Array]:
        *inputs, output, log_sums, gradient = arrays
        ring, queries, keys = parallel.ring(*inputs)
        return ring.backward(queries._replace(mixed=output, log_sums=log_sums, gradient=gradient), keys)

    gradients = parallel.map(local, (parallel.heads,) * 3)(*inputs, metadata, output, log_sums, gradient)
    if sinks is None:
        return *gradients, None, None
    return *gradients, gradient_of_sinks(output, log_sums, sinks, gradient), None


_attend.defvjp(_attend_forward, _attend_backward)
