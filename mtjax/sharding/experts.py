"""Tokens and the experts that they go to, on ranks that each have some of both.

Every rank over `expert` has samples of its own, like those over `data`, and experts of its own, whose inner width may
be split over `model`.

Gather: a rank is sent all tokens of its group over `expert`, computes what its own experts make of them, and the sums
over the experts of all ranks go back to the tokens' ranks. No token is lost, and what is sent has a fixed size.

Exchange: a rank is sent the tokens that its experts are to see, each once, however many of them it goes to, and sends
back the sum over these. No token is lost; what is sent depends on where tokens go (`mtjax.sharding.ragged_all_to_all`).

Capacity: where an expert takes at most so many tokens of a sample, each rank has as many places for every expert and
sample; it sends the tokens in them to the experts' ranks, and these send back what their experts make of them. Ranks
that share a sample tell each other how many of its tokens want which expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from mtjax.sharding.axes import current_rules, explicit_axes, explicit_only, spec, varying_like
from mtjax.sharding.context.zigzag import context_axes, sum_of_preceding_chunks
from mtjax.sharding.no_hoist import no_hoist
from mtjax.sharding.ragged_all_to_all import RaggedRouting, take_rows
from mtjax.theory.plan import ExpertDispatch
from mtjax.theory.rules import Axes

Chosen = tuple[Int[Array, "batch act_seq chosen"], Int[Array, " batch"] | None]
"""Numbers of tokens' experts; and the capacity of each sample, or None where all have the same or none."""


class ExpertCompute(Protocol):
    """What experts compute, on one device; hashable."""

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        gates: Float[Array, "tokens chosen"],
        experts: Int[Array, "tokens chosen"],
        up: Float[Array, "expert embed ..."],
        down: Float[Array, "expert mlp embed"],
    ) -> Float[Array, "tokens embed"]:
        """Sums over each token's experts of gate times output, added up in float32, in the type of x; differentiable.

        `experts` number those of `up` and `down`; other numbers stand for experts that are not here, and add nothing.
        """
        ...


def apply_experts(
    product: ExpertCompute,
    x: Float[Array, "batch act_seq embed"],
    gates: Float[Array, "batch act_seq chosen"],
    experts: Chosen,
    up: tuple[Array, tuple[str, ...]],
    down: tuple[Array, tuple[str, ...]],
    capacity: int | None = None,
    method: ExpertDispatch = "all-gather",
) -> Float[Array, "batch act_seq embed"]:
    """Each token's sum over its experts of gate times output, in the type of x.

    Args:
      product: what experts compute.
      x: tokens.
      gates: float32 weights of the experts' outputs.
      experts: numbers of each token's experts, among all of them, where a number past the last expert means no expert;
        and, where samples differ, the capacity of each sample, int32 [batch], none above `capacity`.
      up: matrices of all experts in the type of x, with the logical names of their dimensions, "expert" the first.
      down: the same, back to the stream.
      capacity: tokens of a sample that an expert takes at most: the first ones; all when None.
      method: how tokens come to other ranks' experts; with a capacity by its places.
    """
    rules, tokens = current_rules(), spec("batch", "act_seq", None)
    matrices = tuple(explicit_only(spec(*names)) for _, names in (up, down))
    is_shared = not set(rules.expert) <= set(rules.batch)
    sequence = tuple(axis for axis in rules.act_seq if axis in rules.mlp)
    context = context_axes()
    samples = spec("batch")
    across = _ExpertParallel(
        product, rules.expert, is_shared, rules.mlp, sequence, context, tokens, samples, matrices, capacity, method
    )
    return _apply(across, x, gates, experts, varying_like(up[0], x), varying_like(down[0], x))


class _ExpertParallel(NamedTuple):
    """What `_apply` runs where."""

    product: ExpertCompute
    expert: Axes
    """Mesh axes over which experts are spread."""
    is_shared: bool
    """Whether ranks along them have the same tokens, not each its own."""
    inner: Axes
    """Those that split an expert's inner width."""
    sequence: Axes
    """Those of them that split the sequences of x."""
    context: Axes
    """Those whose ranks share samples."""
    tokens: PartitionSpec
    """Of x, gates and numbers."""
    samples: PartitionSpec
    """Of capacities."""
    matrices: tuple[PartitionSpec, ...]
    capacity: int | None
    method: ExpertDispatch

    def map(self, body: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Every rank runs `body` on its own tokens and its own part of its own experts."""
        specs = (self.tokens, self.tokens, (self.tokens, self.samples), *self.matrices)

        def mapped(*arrays: Any) -> Any:
            places = (*specs, self.tokens)[: len(arrays)]
            local = jax.shard_map(body, axis_names=set(explicit_axes()), in_specs=places, out_specs=outputs)
            with jax.named_scope("experts"):
                return local(*arrays)

        return mapped

    def local(self, x: Array, gates: Array, chosen: Chosen, up: Array, down: Array) -> Array:
        """A rank's part: [batch, seq, embed] of its own samples."""
        experts, limits = chosen
        if self.sequence:
            x, gates, experts = (lax.all_gather(a, self.sequence, axis=1, tiled=True) for a in (x, gates, experts))
        else:  # here, so that what ranks of `model` sum are the gradients of own tokens
            x, gates = varying_like(x, up), varying_like(gates, up)
        up, down = varying_like(up, x), varying_like(down, x)
        is_apart = bool(self.expert) and not self.is_shared
        if self.capacity is None and self.method == "all-to-all" and is_apart:
            y = self._exchanged(x, gates, experts, up, down)
        elif self.capacity is None:
            y = self._gathered(x, gates, experts, up, down)
        else:
            count = up.shape[0] * (lax.axis_size(self.expert) if self.expert else 1)
            places = _CapacitySlots.of(experts, count, self.capacity, limits, self.context)
            if is_apart:
                y = self._placed(x, gates, places, up, down)
            else:
                y = self._gathered(x, gates, jnp.where(places.is_lost, count, experts), up, down)
        if self.sequence:
            return lax.psum_scatter(y, self.sequence, scatter_dimension=1, tiled=True)
        return lax.psum(y, self.inner) if self.inner else y

    def _gathered(self, x: Array, gates: Array, experts: Array, up: Array, down: Array) -> Array:
        """Sums over all experts, of which each rank over `mlp` may have a part."""
        if self.expert and not self.is_shared:
            x, gates, experts = (lax.all_gather(a, self.expert, tiled=True) for a in (x, gates, experts))
        first = lax.axis_index(self.expert) * up.shape[0] if self.expert else 0
        y = self._computed(x, gates, experts - first, up, down)
        if self.is_shared:
            return lax.psum(y, self.expert)
        return lax.psum_scatter(y, self.expert, scatter_dimension=0, tiled=True) if self.expert else y

    def _exchanged(self, x: Array, gates: Array, experts: Array, up: Array, down: Array) -> Array:
        """The same sums, from those tokens of other ranks that go to experts here; all ranks know where all go."""
        here, ways, (width, chosen) = up.shape[0], lax.axis_size(self.expert), (x.shape[-1], gates.shape[-1])
        gates, experts = (lax.all_gather(a, self.expert, tiled=True).reshape(-1, chosen) for a in (gates, experts))
        owners = (experts // here).reshape(ways, -1, 1, chosen)
        goes = (owners == jnp.arange(ways)[:, None]).any(-1)
        trip = RaggedRouting.of(goes, min(chosen, ways), self.expert)
        first = lax.axis_index(self.expert) * here
        numbers = take_rows(experts - first, trip.arriving, -1)
        y = self._computed(trip.dispatch(x.reshape(-1, width)), take_rows(gates, trip.arriving), numbers, up, down)
        return trip.combine(y).astype(x.dtype).reshape(x.shape)

    def _placed(self, x: Array, gates: Array, places: "_CapacitySlots", up: Array, down: Array) -> Array:
        """The same sums, from what experts are sent."""
        here, ways, width = up.shape[0], lax.axis_size(self.expert), x.shape[-1]

        def to_experts(a: Array) -> Array:
            """[places, n], zeros in those that are empty -> [ways, experts here, places of each rank, n]."""
            return lax.all_to_all(a.reshape(ways, here, -1, a.shape[-1]), self.expert, 0, 0)

        tokens = places.taken(x.reshape(-1, width), gates.shape[-1])
        sent, sent_gates = to_experts(tokens), to_experts(places.taken(gates.reshape(-1, 1), 1))
        # Nothing is computed for empty places.
        owners = jnp.where(sent_gates > 0, jnp.arange(here)[:, None, None], here)
        y = self._computed(sent, sent_gates, owners, up, down)
        back = lax.all_to_all(y, self.expert, 0, 0).reshape(-1, width)
        return places.added(back, gates.shape[-1], x)

    def _computed(self, x: Array, gates: Array, experts: Array, up: Array, down: Array) -> Array:
        rows = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
        x, gates = varying_like(x, up), varying_like(gates, up)
        return self.product(rows(x), rows(gates), rows(experts), up, down).reshape(x.shape)


class _CapacitySlots(NamedTuple):
    """So many places for every expert and sample, in this order, and the pairs of a token and an expert in them."""

    pairs: Int[Array, " places"]
    """Numbers of pairs; in empty places a number behind the last."""
    is_lost: Bool[Array, "batch seq chosen"]
    """Pairs for which there was no place left."""

    @classmethod
    def of(
        cls,
        experts: Int[Array, "batch seq chosen"],
        count: int,
        capacity: int,
        limits: Int[Array, " batch"] | None,
        context: Axes = (),
    ) -> "_CapacitySlots":
        """Pairs take places in the order of the text, so that what is lost depends on a sample alone.

        Each expert and sample has places for `capacity` pairs, of which at most `limits` are taken if these are given.
        Where ranks over `context` share samples, each has places for what is not lost of its own tokens.
        """
        samples, length = experts.shape[:2]
        each = experts.reshape(samples, -1)
        most: Any = capacity if limits is None else limits[:, None]
        hot = jax.nn.one_hot(each, count, dtype=jnp.int32)
        number = _number(hot)
        if context:
            chunks = hot.reshape(samples, 2, -1, count)
            before = jnp.moveaxis(sum_of_preceding_chunks(jnp.moveaxis(chunks.sum(2), 1, 0), context), 0, 1)
            is_lost = (_number(chunks) + (before[:, :, None] * chunks).sum(-1)).reshape(each.shape) >= most
            number, capacity = _number(jnp.where(is_lost[..., None], 0, hot)), min(capacity, length)
        else:
            is_lost = number >= most
        place = (each * samples + jnp.arange(samples)[:, None]) * capacity + number
        size = count * samples * capacity
        place = jnp.where(is_lost, size, place).reshape(-1)
        empty = varying_like(jnp.full(size, experts.size, jnp.int32), experts)
        pairs = empty.at[place].set(jnp.arange(experts.size, dtype=jnp.int32), mode="drop", unique_indices=True)
        return cls(pairs, is_lost.reshape(experts.shape))

    def taken(self, x: Float[Array, "rows width"], of_row: int) -> Float[Array, "places width"]:
        """Rows of x, each of which has `of_row` pairs, by places."""
        return x.at[self.pairs // of_row].get(mode="fill", fill_value=0)

    def added(self, values: Float[Array, "places width"], of_row: int, like: Array) -> Array:
        """The values added up to rows, an array like `like`; in float32."""
        total = varying_like(jnp.zeros((like.size // like.shape[-1], like.shape[-1]), jnp.float32), values)
        total = total.at[self.pairs // of_row].add(values.astype(jnp.float32), mode="drop")
        return total.astype(like.dtype).reshape(like.shape)


def _number(hot: Int[Array, "*batch pairs experts"]) -> Int[Array, "*batch pairs"]:
    """How many pairs before each want the same expert."""
    return ((jnp.cumsum(hot, -2) - 1) * hot).sum(-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(across: _ExpertParallel, x: Array, gates: Array, experts: Chosen, up: Array, down: Array) -> Array:
    return no_hoist(across.map(across.local, across.tokens), x, gates, experts, up, down)


def _apply_forward(across: _ExpertParallel, *arrays: Any) -> tuple[Array, tuple[Any, ...]]:
    return _apply(across, *arrays), arrays


def _apply_backward(across: _ExpertParallel, saved: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    def body(x: Array, gates: Array, experts: Chosen, up: Array, down: Array, gradient: Array) -> tuple[Array, ...]:
        run = lambda x, gates, up, down: across.local(x, gates, experts, up, down)  # noqa: E731
        return jax.vjp(run, x, gates, up, down)[1](gradient)

    mapped = across.map(body, (across.tokens, across.tokens, *across.matrices))
    x, gates, up, down = mapped(*saved, gradient)
    return x, gates, None, up, down


_apply.defvjp(_apply_forward, _apply_backward)
