"""Attention across the ranks that share the tokens of samples: each runs `Turns` for its heads, forward and back."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float

from mtjax.sharding.axes import explicit_axes, spec
from mtjax.sharding.context.block_attention import BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.context.ring_attention import Method, RingAttention
from mtjax.sharding.context.zigzag import context_axes
from mtjax.sharding.no_hoist import no_hoist

Tree = Any


def context_attention(
    kernel: BlockKernel,
    method: Method,
    is_causal: bool,
    queries: QueryBlock,
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    drops: DropoutState | None,
    names: tuple[str, str],
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax attention to the tokens of all ranks that share samples.

    Args:
      kernel: for blocks of queries and keys.
      method: how keys and values come to the queries.
      is_causal: whether tokens attend to those before them only.
      queries: this rank's; places are [seq], alike in all samples.
      key: this rank's; heads / groups queries in turn share a key and a value head.
      value: what is mixed.
      drops: of dropout on probabilities, with all heads' numbers; None turns it off.
      names: of what is saved for the backward pass: the mixed values, and float32 statistics [batch, seq, heads].
    """
    (axis,) = context_axes()
    if drops is not None:
        drops = drops._replace(heads=reshard(drops.heads, spec("heads")))
    heads, statistics = spec("batch", "seq", "heads", "head_dim"), spec("batch", "seq", "heads")
    across = _ContextParallel(kernel, method, is_causal, axis, heads, statistics, spec("heads"), names)
    return _attend(across, queries.query, key, value, (queries.positions, queries.segments, drops))


class _ContextParallel(NamedTuple):
    """What `_attend` runs where."""

    kernel: BlockKernel
    method: Method
    is_causal: bool
    axis: str
    heads: PartitionSpec
    statistics: PartitionSpec
    numbers: PartitionSpec
    """Of the heads' numbers."""
    names: tuple[str, str]

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Every rank runs `body` on its own samples and heads: (query, key, value, rest, ...)."""

        def place(a: Array) -> PartitionSpec:
            return {4: self.heads, 3: self.statistics}.get(a.ndim, PartitionSpec())

        def mapped(query: Array, key: Array, value: Array, rest: Tree, *more: Array) -> Any:
            of_rest = jax.tree.map(lambda a: PartitionSpec(), rest)
            if of_rest[-1] is not None:
                of_rest = (*of_rest[:-1], of_rest[-1]._replace(heads=self.numbers))
            specs = (*map(place, (query, key, value)), of_rest, *map(place, more))
            local = jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=specs, out_specs=outputs)
            with jax.named_scope("context"):
                return local(query, key, value, rest, *more)

        return mapped

    def turns(self, query: Array, key: Array, value: Array, rest: Tree) -> tuple[RingAttention, QueryBlock, KVBlock]:
        """What a rank has and does, inside the map."""
        places, segments, drops = rest
        rank = places[0] // (len(places) // 2)  # its first chunk's number
        of_samples = jnp.broadcast_to(places, query.shape[:2])
        turns = RingAttention(self.kernel, self.method, self.is_causal, self.axis, rank, drops)
        return turns, QueryBlock(query, of_samples, segments), KVBlock(key, value, of_samples, segments)


def _forward(across: _ContextParallel, query: Array, key: Array, value: Array, rest: Tree) -> tuple[Array, Array]:
    def local(*arrays: Any) -> tuple[Array, Array]:
        turns, queries, keys = across.turns(*arrays)
        return turns.forward(queries, keys)

    return no_hoist(across.map(local, (across.heads, across.statistics)), query, key, value, rest)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(across: _ContextParallel, query: Array, key: Array, value: Array, rest: Tree) -> Array:
    return _forward(across, query, key, value, rest)[0]


def _attend_forward(across: _ContextParallel, query: Array, key: Array, value: Array, rest: Tree) -> tuple[Array, Tree]:
    arrays = _forward(across, query, key, value, rest)
    mixed, log_sums = (checkpoint_name(a, name) for a, name in zip(arrays, across.names, strict=True))
    return mixed, (query, key, value, rest, mixed, log_sums)


def _attend_backward(across: _ContextParallel, saved: Tree, gradient: Array) -> tuple[Array, Array, Array, None]:
    def local(*arrays: Any) -> tuple[Array, Array, Array]:
        *inputs, mixed, log_sums, gradient = arrays
        turns, queries, keys = across.turns(*inputs)
        return turns.backward(queries._replace(mixed=mixed, log_sums=log_sums, gradient=gradient), keys)

    return *across.map(local, (across.heads,) * 3)(*saved, gradient), None


_attend.defvjp(_attend_forward, _attend_backward)
