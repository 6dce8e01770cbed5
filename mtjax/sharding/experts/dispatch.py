"""Expert parallelism: dispatches tokens to the ranks of their experts, and combines the experts' outputs.

Every rank along `expert` has different samples, as along `data`, and different experts, whose inner width may be
sharded over `model`. There are three dispatchers:

All-gather: each rank gathers the tokens of all ranks along `expert` and applies its experts; a reduce-scatter returns
the sums over all experts to the tokens' ranks. No token is dropped, and the communication has a fixed size.

All-to-all: each rank receives the tokens of its experts, each token once even if several of its experts are there, and
returns the sum over these. No token is dropped; the communication depends on the routing
(`mtjax.sharding.experts.ragged_all_to_all`).

Capacity: an expert accepts at most `capacity` tokens of a sample, and tokens beyond it are dropped. Each rank has that
many slots for every expert and sample; an all-to-all sends the slots to the experts' ranks, and another one returns
their outputs. With context parallelism, ranks exchange how many tokens of a sample chose which expert.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from mtjax.layout.plan import ExpertDispatch
from mtjax.layout.rules import Axes
from mtjax.sharding.axes import context_axes, current_rules, explicit_only, map_ranks, no_hoist, spec, varying_like
from mtjax.sharding.context.zigzag import sum_of_preceding_chunks
from mtjax.sharding.experts.ragged_all_to_all import RaggedRouting, take_rows

Chosen = tuple[Int[Array, "batch act_seq chosen"], Int[Array, " batch"] | None]
"""Indices of tokens' experts; and the capacity of each sample, or None where all have the same or none."""


class ExpertCompute(Protocol):
    """The computation of experts on one device; hashable."""

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        gates: Float[Array, "tokens chosen"],
        experts: Int[Array, "tokens chosen"],
        up: Float[Array, "expert embed ..."],
        down: Float[Array, "expert mlp embed"],
        *biases: Float[Array, "expert ..."],
    ) -> Float[Array, "tokens embed"]:
        """Computes the sum over each token's experts of gate times output, accumulated in float32; differentiable.

        `experts` are indices into all weights; other numbers mean experts of other ranks, and add nothing. `biases`,
        one or none, are added before the activation, in float32.
        """
        ...


def apply_experts(
    compute: ExpertCompute,
    x: Float[Array, "batch act_seq embed"],
    gates: Float[Array, "batch act_seq chosen"],
    experts: Chosen,
    weights: Sequence[tuple[Array, tuple[str, ...]]],
    capacity: int | None = None,
    method: ExpertDispatch = "all-gather",
) -> Float[Array, "batch act_seq embed"]:
    """Computes each token's sum over its experts of gate times output, in the type of x.

    Args:
      compute: the experts' computation.
      x: tokens.
      gates: float32 weights of the experts' outputs.
      experts: indices of each token's experts, among all experts, where an index past the last expert means no expert;
        and, where samples differ, the capacity of each sample, int32 [batch], none above `capacity`.
      weights: up and down, matrices of all experts in the type of x, and perhaps the biases of up, float32; each with
        the logical names of its dimensions, "expert" the first.
      capacity: maximum number of tokens of a sample per expert, the first ones; no limit when None.
      method: dispatcher without a capacity; with one, slots are dispatched.
    """
    # All that depends on the rules is read here: `_apply` is a custom_vjp, which jax may trace without them.
    rules, tokens = current_rules(), spec("batch", "act_seq", None)
    shards = tuple(explicit_only(spec(*names)) for _, names in weights)
    # Experts may be sharded over axes along which ranks have the same tokens; then there is nothing to dispatch.
    is_shared = not set(rules.expert) <= set(rules.batch)
    # With sequence parallelism ranks along `model` have different tokens, but shards of the same experts: they gather
    # the tokens first, and reduce-scatter partial sums at the end.
    sequence = tuple(axis for axis in rules.act_seq if axis in rules.mlp)
    context = context_axes()
    samples = spec("batch")
    dispatch = _ExpertParallel(
        compute, rules.expert, is_shared, rules.mlp, sequence, context, tokens, samples, shards, capacity, method
    )
    return _apply(dispatch, x, gates, experts, *(varying_like(values, x) for values, _ in weights))


class _ExpertParallel(NamedTuple):
    """Static arguments of `_apply`: the computation, mesh axes and shardings."""

    compute: ExpertCompute
    expert: Axes
    """Mesh axes over which experts are sharded."""
    is_shared: bool
    """Whether ranks along them have the same tokens, and not different samples."""
    inner: Axes
    """Mesh axes over which an expert's inner width is sharded."""
    sequence: Axes
    """Those of `inner` over which the sequences of x are sharded."""
    context: Axes
    """Mesh axes of context parallelism."""
    tokens: PartitionSpec
    """Of x, gates and indices of experts."""
    samples: PartitionSpec
    """Of capacities."""
    weights: tuple[PartitionSpec, ...]
    """Of the matrices and biases."""
    capacity: int | None
    method: ExpertDispatch

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Maps `body` over the shards of (x, gates, chosen, *weights) or also of a gradient of x's shape."""
        specs = (self.tokens, self.tokens, (self.tokens, self.samples), *self.weights)

        def mapped(*arrays: Any) -> Any:
            in_specs = (*specs, self.tokens)[: len(arrays)]
            local = map_ranks(body, in_specs, outputs)
            with jax.named_scope("experts"):
                return local(*arrays)

        return mapped

    def local(self, x: Array, gates: Array, chosen: Chosen, *weights: Array) -> Array:
        """Runs on one rank, inside the map, with all axes manual.

        Args:
          x: this rank's tokens, [batch, act_seq, embed].
          gates: float32 [batch, act_seq, chosen].
          chosen: indices of experts [batch, act_seq, chosen], and capacities [batch] or None.
          weights: this rank's shards of its experts: up [experts here, embed, ...], down [experts here, mlp, embed],
            and perhaps biases [experts here, ...].

        Returns:
          [batch, act_seq, embed].
        """
        experts, limits = chosen
        if self.sequence:
            x, gates, experts = (lax.all_gather(a, self.sequence, axis=1, tiled=True) for a in (x, gates, experts))
        else:
            # The transpose of this cast is an all-reduce of gradients over `model`. Here, before the dispatch, it
            # reduces gradients of this rank's tokens, not of all that it received.
            x, gates = varying_like(x, weights[0]), varying_like(gates, weights[0])
        weights = tuple(varying_like(weight, x) for weight in weights)
        is_dispatched = bool(self.expert) and not self.is_shared
        if self.capacity is None and self.method == "all-to-all" and is_dispatched:
            y = self._all_to_all(x, gates, experts, *weights)
        elif self.capacity is None:
            y = self._all_gather(x, gates, experts, *weights)
        else:
            count = weights[0].shape[0] * (lax.axis_size(self.expert) if self.expert else 1)
            slots = _CapacitySlots.of(experts, count, self.capacity, limits, self.context)
            if is_dispatched:
                y = self._dispatch_slots(x, gates, slots, *weights)
            else:
                # Where no slots are sent, pairs beyond the capacity get the index of no expert.
                y = self._all_gather(x, gates, jnp.where(slots.is_dropped, count, experts), *weights)
        # Row-parallel: each rank of `inner` has a partial sum over its shard of the experts' inner width.
        if self.sequence:
            return lax.psum_scatter(y, self.sequence, scatter_dimension=1, tiled=True)
        return lax.psum(y, self.inner) if self.inner else y

    def _all_gather(self, x: Array, gates: Array, experts: Array, *weights: Array) -> Array:
        """Dispatches by an all-gather: [batch, seq, embed] -> [batch, seq, embed], partial sums over `inner`."""
        if self.expert and not self.is_shared:
            x, gates, experts = (lax.all_gather(a, self.expert, tiled=True) for a in (x, gates, experts))
        # Experts are sharded in consecutive blocks, in the order of the ranks.
        first = lax.axis_index(self.expert) * weights[0].shape[0] if self.expert else 0
        # Indices outside [0, experts here) are other ranks' experts; they add nothing.
        y = self._compute_local(x, gates, experts - first, *weights)
        # The tokens are the same on all ranks: each adds what its experts contribute.
        if self.is_shared:
            return lax.psum(y, self.expert)
        return lax.psum_scatter(y, self.expert, scatter_dimension=0, tiled=True) if self.expert else y

    def _all_to_all(self, x: Array, gates: Array, experts: Array, *weights: Array) -> Array:
        """Dispatches by a ragged all-to-all: [batch, seq, embed] -> [batch, seq, embed], partial sums over `inner`."""
        here, ranks, (width, chosen) = weights[0].shape[0], lax.axis_size(self.expert), (x.shape[-1], gates.shape[-1])
        # The routing of all ranks' tokens is small, and every rank needs it to know how many rows it receives.
        gates, experts = (lax.all_gather(a, self.expert, tiled=True).reshape(-1, chosen) for a in (gates, experts))
        # An index past the last expert has an owner past the last rank, to which nothing is sent.
        owners = (experts // here).reshape(ranks, -1, 1, chosen)
        # A token is sent to a rank once, even where several of its experts are there.
        is_sent = (owners == jnp.arange(ranks)[:, None]).any(-1)
        routing = RaggedRouting.of(is_sent, min(chosen, ranks), self.expert)
        first = lax.axis_index(self.expert) * here
        # Padding gets the index -1, which is not an expert.
        local_experts = take_rows(experts - first, routing.received, -1)
        # The gates need not be sent: every rank has gathered all of them. Their gradients come back by the gather's
        # transpose.
        tokens, received_gates = routing.dispatch(x.reshape(-1, width)), take_rows(gates, routing.received)
        y = self._compute_local(tokens, received_gates, local_experts, *weights)
        return routing.combine(y).astype(x.dtype).reshape(x.shape)

    def _dispatch_slots(self, x: Array, gates: Array, slots: "_CapacitySlots", *weights: Array) -> Array:
        """Dispatches capacity slots by an all-to-all: [batch, seq, embed] -> [batch, seq, embed]."""
        here, ranks, width = weights[0].shape[0], lax.axis_size(self.expert), x.shape[-1]

        def to_experts(a: Array) -> Array:
            """[slots, n], zeros in empty slots -> [ranks, experts here, slots of each rank, n]."""
            return lax.all_to_all(a.reshape(ranks, here, -1, a.shape[-1]), self.expert, 0, 0)

        tokens = slots.take(x.reshape(-1, width), gates.shape[-1])
        received, received_gates = to_experts(tokens), to_experts(slots.take(gates.reshape(-1, 1), 1))
        # An empty slot has gate 0, and the index of no expert: nothing is computed for it.
        owners = jnp.where(received_gates > 0, jnp.arange(here)[:, None, None], here)
        y = self._compute_local(received, received_gates, owners, *weights)
        returned = lax.all_to_all(y, self.expert, 0, 0).reshape(-1, width)
        return slots.combine(returned, gates.shape[-1], x)

    def _compute_local(self, x: Array, gates: Array, experts: Array, *weights: Array) -> Array:
        """Applies this rank's experts to tokens [..., embed]."""
        rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        x, gates = varying_like(x, weights[0]), varying_like(gates, weights[0])
        return self.compute(rows(x), rows(gates), rows(experts), *weights).reshape(x.shape)


class _CapacitySlots(NamedTuple):
    """Slots for `capacity` tokens of every expert and sample, and which (token, expert) pair is in each.

    Slots are in the order expert, sample, number; pairs in the order token, choice.
    """

    pairs: Int[Array, " slots"]
    """Indices of pairs; in empty slots an index past the last pair."""
    is_dropped: Bool[Array, "batch seq chosen"]
    """Pairs for which there was no slot."""

    @classmethod
    def of(
        cls,
        experts: Int[Array, "batch seq chosen"],
        count: int,
        capacity: int,
        limits: Int[Array, " batch"] | None,
        context: Axes = (),
    ) -> "_CapacitySlots":
        """Assigns slots to pairs in the order of tokens, so that what is dropped depends on a sample alone.

        Args:
          experts: of each pair; `count` means no expert.
          count: of all experts.
          capacity: slots per expert and sample.
          limits: how many of these may be used, int32 [batch]; all when None.
          context: mesh axes of context parallelism. Then a rank has slots for its tokens that are not dropped.
        """
        samples, length = experts.shape[:2]
        each = experts.reshape(samples, -1)
        limit: Any = capacity if limits is None else limits[:, None]
        # A pair without an expert (`count`) has a row of zeros, and number 0: its slot below is past the last, and
        # dropped.
        hot = jax.nn.one_hot(each, count, dtype=jnp.int32)
        number = _numbers(hot)
        if context:
            # A rank has two chunks of each sample (zig-zag). A pair's number counts the pairs of all chunks before it.
            chunks = hot.reshape(samples, 2, -1, count)
            before = jnp.moveaxis(sum_of_preceding_chunks(jnp.moveaxis(chunks.sum(2), 1, 0), context), 0, 1)
            is_dropped = (_numbers(chunks) + (before[:, :, None] * chunks).sum(-1)).reshape(each.shape) >= limit
            # This rank's slots are numbered among the pairs that it keeps: at most as many per expert as the rank has
            # tokens, as a token chooses an expert once.
            number, capacity = _numbers(jnp.where(is_dropped[..., None], 0, hot)), min(capacity, length)
        else:
            is_dropped = number >= limit
        slot = (each * samples + jnp.arange(samples)[:, None]) * capacity + number
        size = count * samples * capacity
        slot = jnp.where(is_dropped, size, slot).reshape(-1)
        empty = varying_like(jnp.full(size, experts.size, jnp.int32), experts)
        pairs = empty.at[slot].set(jnp.arange(experts.size, dtype=jnp.int32), mode="drop", unique_indices=True)
        return cls(pairs, is_dropped.reshape(experts.shape))

    def take(self, x: Float[Array, "rows width"], pairs_per_row: int) -> Float[Array, "slots width"]:
        """Gathers the rows of x, each of which has `pairs_per_row` pairs, into slots; zeros in empty ones."""
        # An empty slot's index is past the last row, since its pair's is past the last pair.
        return x.at[self.pairs // pairs_per_row].get(mode="fill", fill_value=0)

    def combine(self, values: Float[Array, "slots width"], pairs_per_row: int, like: Array) -> Array:
        """Adds up the slots of each row, in float32: an array like `like`, [..., width]."""
        total = varying_like(jnp.zeros((like.size // like.shape[-1], like.shape[-1]), jnp.float32), values)
        total = total.at[self.pairs // pairs_per_row].add(values.astype(jnp.float32), mode="drop")
        return total.astype(like.dtype).reshape(like.shape)


def _numbers(hot: Int[Array, "*batch pairs experts"]) -> Int[Array, "*batch pairs"]:
    """Counts the pairs before each that have the same expert."""
    return ((jnp.cumsum(hot, -2) - 1) * hot).sum(-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(dispatch: _ExpertParallel, x: Array, gates: Array, experts: Chosen, *weights: Array) -> Array:
    # One primitive: the scan over layers would hoist constants, such as ranks' indices, even out of the map.
    return no_hoist(dispatch.map(dispatch.local, dispatch.tokens), x, gates, experts, *weights)


def _apply_forward(dispatch: _ExpertParallel, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _apply(dispatch, *arrays), arrays


def _apply_backward(dispatch: _ExpertParallel, saved: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    """Differentiates `local` by a gradient [batch, act_seq, embed]; returns those of x, gates and weights."""

    # The forward pass is recomputed inside the map, so that only the arguments of `_apply` are saved.
    def body(x: Array, gates: Array, experts: Chosen, *rest: Array) -> tuple[Array, ...]:
        *weights, gradient = rest
        run = lambda x, gates, *weights: dispatch.local(x, gates, experts, *weights)  # noqa: E731
        return jax.vjp(run, x, gates, *weights)[1](gradient)

    mapped = dispatch.map(body, (dispatch.tokens, dispatch.tokens, *dispatch.weights))
    x, gates, *weights = mapped(*saved, gradient)
    return x, gates, None, *weights


_apply.defvjp(_apply_forward, _apply_backward)
