"""Mamba-2's scan in chunks (state-space duality, arXiv 2405.21060, section 6): products inside chunks, a state between.

`h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t'` and `y_t = C_t h_t`, for every head, with a state [width, state] each.

Letters of shapes: b samples, s tokens, c chunks of q tokens, u groups of heads that share B and C, h heads of a group,
p width of a head, n width of the state. Decays are logarithms; decays and states are float32, products are computed in
the type of x.
"""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.sharding.axes import PartitionSpec, spec, varying_like, where

HIGHEST = lax.Precision.HIGHEST
Inputs = TypeVar("Inputs", bound=Any)


class ScanInputs(NamedTuple):
    """What the scan reads of each token."""

    x: Float[Array, "b s u h p"]
    rate: Float[Array, "b s u h"]
    """dt: float32, 0 or more."""
    b: Float[Array, "b s u n"]
    c: Float[Array, "b s u n"]
    segments: Int[Array, "b s"] | None = None
    """Document of each token: no state passes from one to the next."""


def scan(
    inputs: ScanInputs,
    a: Float[Array, "u h"],
    size: int,
    at_once: int,
    state: Float[Array, "b u h p n"] | None = None,
    before: Int[Array, " b"] | None = None,
) -> tuple[Float[Array, "b s u h p"], Float[Array, "b u h p n"]]:
    """Runs the recurrence over all tokens.

    Args:
      inputs: of the tokens.
      a: A, below 0, float32.
      size: tokens of a chunk.
      at_once: chunks whose weights are alive at the same time; longer samples go through a loop.
      state: that comes in; zeros when None.
      before: document of the token before the first, where a state comes in.

    Returns:
      What is read of the states, in the type of x, and the last state, float32.
    """
    length = inputs.x.shape[1]
    size = min(size, length)
    inputs = whole_chunks(inputs, size)
    count = inputs.x.shape[1] // size
    # The most chunks of a block that divide them into equal blocks.
    at_once = next(n for n in range(min(at_once, count), 0, -1) if count % n == 0)

    def block(state: Array | None, before: Array | None, block_inputs: ScanInputs) -> tuple[Array, Array]:
        chunks = _Chunks.of(block_inputs, a, size, before)
        incoming, state = pass_states(chunks.total, chunks.states, state, chunks.goes_on)
        y = chunks.within() + chunks.across(incoming)
        return joined(y.astype(block_inputs.x.dtype)), state

    if at_once == count:
        y, state = block(state, before, inputs)
        return y[:, :length], state

    def iteration(
        carry: tuple[Array, Array | None], block_inputs: ScanInputs
    ) -> tuple[tuple[Array, Array | None], Array]:
        y, state = block(*carry, block_inputs)
        return (state, None if block_inputs.segments is None else block_inputs.segments[:, -1]), y

    if state is None:
        batch, groups, heads, width = (inputs.x.shape[i] for i in (0, 2, 3, 4))
        shape, sharding = (batch, groups, heads, width, inputs.b.shape[-1]), spec("batch", "heads", None, None, None)
        state = varying_like(jnp.zeros(shape, jnp.float32, out_sharding=sharding), inputs.x)
    if before is None and inputs.segments is not None:
        before = inputs.segments[:, 0]
    blocks = jax.tree.map(lambda v: jnp.moveaxis(in_chunks(v, at_once * size), 1, 0), inputs)
    # A block saves the state that comes in; its weights between tokens are recomputed, and alive for one block at a
    # time.
    (state, _), y = lax.scan(jax.checkpoint(iteration), (state, before), blocks)
    return joined(jnp.moveaxis(y, 0, 1))[:, :length], state


def step(
    inputs: ScanInputs, a: Float[Array, "u h"], state: Float[Array, "b u h p n"]
) -> tuple[Float[Array, "b 1 u h p"], Float[Array, "b u h p n"]]:
    """Runs the recurrence for one token of each sequence, in float32; arguments and results as of `scan`."""
    x, rate, b, c = (v[:, 0].astype(jnp.float32) for v in inputs[:4])
    state = jnp.exp(rate * a)[..., None, None] * state + (rate[..., None] * x)[..., None] * b[:, :, None, None]
    y = jnp.einsum("buhpn,bun->buhp", state, c, precision=HIGHEST)
    return y[:, None].astype(inputs.x.dtype), state


def left_behind(inputs: ScanInputs, a: Float[Array, "u h"], size: int) -> tuple[Array, Array]:
    """Computes what tokens leave in a state without reading it.

    Args:
      inputs: of the tokens; without C's effect.
      a: A.
      size: tokens of a chunk.

    Returns:
      The last state if none comes in, [b, u, h, p, n], and the decay of one that does, [b, u, h].
    """
    size = min(size, inputs.x.shape[1])
    chunks = _Chunks.of(whole_chunks(inputs, size), a, size, None)
    total = chunks.total
    # Summed from the end: a difference of sums from the start would lose digits where the decay before is strong.
    behind = jnp.flip(jnp.cumsum(jnp.flip(total, 1), 1), 1) - total
    weights = jnp.exp(behind)
    if chunks.segments is not None:
        last = chunks.segments[:, -1, -1]
        weights = jnp.where((chunks.segments[:, :, -1] == last[:, None])[..., None, None], weights, 0)
    return jnp.einsum("bcuh,bcuhpn->buhpn", weights, chunks.states, precision=HIGHEST), total.sum(1)


def pass_states(
    total: Float[Array, "b c u h"],
    states: Float[Array, "b c u h p n"],
    first: Float[Array, "b u h p n"] | None,
    goes_on: Bool[Array, "b c"] | None,
) -> tuple[Float[Array, "b c u h p n"], Float[Array, "b u h p n"]]:
    """Passes states from chunk to chunk: one product over all pairs of chunks.

    Args:
      total: decay of each chunk.
      states: what the tokens of each chunk leave.
      first: state that comes into the first chunk; zeros when None.
      goes_on: whether what comes into a chunk also leaves it; always when None.

    Returns:
      The states that come into each chunk, and the one that leaves the last.
    """
    count = total.shape[1]
    decay = jnp.cumsum(total, 1) if count > 1 else total
    until = decay - total  # up to the end of the chunk before
    passes = jnp.tril(jnp.ones((count, count), bool), -1)[None, :, :, None, None]
    fades, breaks, begun_before = until[:, :, None] - decay[:, None], None, None
    if goes_on is not None:
        breaks = jnp.cumsum(~goes_on, 1)
        # Chunks in which a document begins, up to and with each chunk (`breaks`), and without it (`begun_before`): a
        # state passes where none is between.
        begun_before = breaks - ~goes_on
        passes = passes & (begun_before[:, :, None] == breaks[:, None])[..., None, None]
    # Masked before the exponential: differences to later chunks are positive, and would overflow.
    weights = jnp.exp(jnp.where(passes, fades, -jnp.inf))
    incoming = jnp.einsum("bizuh,bzuhpn->biuhpn", weights, states, precision=HIGHEST)
    if first is not None:
        kept = jnp.exp(until)
        if begun_before is not None:
            kept = jnp.where((begun_before == 0)[..., None, None], kept, 0)
        incoming = incoming + kept[..., None, None] * first[:, None]
    last = jnp.exp(total[:, -1])
    if goes_on is not None:
        last = jnp.where(goes_on[:, -1, None, None], last, 0)
    return incoming, last[..., None, None] * incoming[:, -1] + states[:, -1]


class _Chunks(NamedTuple):
    """Tokens in chunks, [b, c, q, ...], and what follows from dt, with tokens last."""

    x: Array
    rate: Float[Array, "b c u h q"]
    b: Array
    c: Array
    segments: Array | None
    before: Array | None
    """Document of the token before each chunk, [b, c]."""
    decay: Float[Array, "b c u h q"]
    """From the chunk's start up to and with each token."""

    @classmethod
    def of(cls, inputs: ScanInputs, a: Float[Array, "u h"], size: int, before: Array | None) -> "_Chunks":
        """Cuts tokens into chunks of `size`; `before` is the document of the token before the first."""
        x, rate, b, c, segments = jax.tree.map(lambda v: in_chunks(v, size), inputs)
        # XLA: a product with a triangle: prefix sums are slow on CPUs, and take several kernels on GPUs.
        triangle = jnp.tril(jnp.ones((size, size), jnp.float32))
        # XLA: of rates [b, c, q, u, h] the sum over queries that is part of their gradient was computed inside the
        # transposition of the whole gradient, with strided reads of the weights: 4 times as long as their bytes.
        rate = jnp.moveaxis(rate, 2, -1)
        decay = jnp.einsum("qk,bcuhk->bcuhq", triangle, rate * a[..., None], precision=HIGHEST)
        if segments is not None:
            first = segments[:, 0, 0] if before is None else before
            before = jnp.concatenate([first[:, None], segments[:, :-1, -1]], 1)
        return cls(x, rate, b, c, segments, before, decay)

    @property
    def total(self) -> Float[Array, "b c u h"]:
        """Decay of each chunk."""
        return self.decay[..., -1]

    @property
    def goes_on(self) -> Bool[Array, "b c"] | None:
        """Whether each chunk ends in the document of the token before it."""
        return None if self.segments is None else self.segments[:, :, -1] == self.before

    @property
    def states(self) -> Float[Array, "b c u h p n"]:
        """What the tokens of each chunk leave in the state."""
        left = jnp.exp(to_last(self.decay)) * self.rate
        if self.segments is not None:
            left = jnp.where((self.segments == self.segments[:, :, -1:])[:, :, None, None], left, 0)
        left = jnp.moveaxis(left, -1, 2)[..., None]
        return wide_einsum("bckun,bckuhp->bcuhpn", self.b, (self.x * left).astype(self.x.dtype))

    def within(self) -> Float[Array, "b c q u h p"]:
        """Computes what tokens read of those before them in their chunk."""
        size = self.x.shape[2]
        sees = jnp.tril(jnp.ones((size, size), bool))[None, None, None, None]
        if self.segments is not None:
            sees = sees & (self.segments[:, :, :, None] == self.segments[:, :, None])[:, :, None, None]
        fades = jnp.exp(where(sees, between(self.decay), -jnp.inf))
        scores = wide_einsum("bcqun,bckun->bcuqk", self.c, self.b)
        weights = (scores[:, :, :, None] * fades * self.rate[..., None, :]).astype(self.x.dtype)
        return jnp.einsum("bcuhqk,bckuhp->bcquhp", weights, self.x)

    def across(self, states: Float[Array, "b c u h p n"]) -> Float[Array, "b c q u h p"]:
        """Computes what tokens read of the states that come into their chunks."""
        fades = jnp.exp(self.decay)
        if self.segments is not None:
            assert self.before is not None
            fades = jnp.where((self.segments == self.before[..., None])[:, :, None, None], fades, 0)
        read = jnp.einsum("bcqun,bcuhpn->bcquhp", self.c, states.astype(self.x.dtype))
        # After the product, in which rows are tokens: the decay is a factor of a row, and stays float32.
        return read * jnp.moveaxis(fades, -1, 2)[..., None]


def between(decay: Float[Array, "*batch q"]) -> Float[Array, "*batch q q"]:
    """Computes the decay from each token (last) to each other, 0 from a token to itself."""
    # A difference of two equal numbers has gradients that cancel, and leaves rounding of what tokens read of
    # themselves. With strong decays that is far more than the gradients of what they read of others.
    size = decay.shape[-1]
    others = jnp.asarray(~np.eye(size, dtype=bool)).reshape((1,) * (decay.ndim - 1) + (size, size))
    return where(others, decay[..., :, None] - decay[..., None, :], 0.0)


def to_last(decay: Float[Array, "*batch q"]) -> Float[Array, "*batch q"]:
    """Computes the decay from each token to the last, 0 from the last to itself; see `between`."""
    return jnp.pad(decay[..., -1:] - decay[..., :-1], [(0, 0)] * (decay.ndim - 1) + [(0, 1)])


def wide_einsum(subscripts: str, *arrays: Array) -> Array:
    """Computes an einsum whose sums, and result, are float32."""
    return jnp.einsum(subscripts, *arrays, preferred_element_type=jnp.float32)


def in_chunks(x: Array, size: int) -> Array:
    """Cuts tokens into chunks: [b, s, ...] -> [b, c, size, ...]."""
    sharding = jax.typeof(x).sharding.spec
    return _reshaped(x, (x.shape[0], x.shape[1] // size, size, *x.shape[2:]), (*sharding[:2], None, *sharding[2:]))


def joined(chunks: Array) -> Array:
    """Joins the tokens of chunks: [b, c, q, ...] -> [b, s, ...]."""
    sharding, (count, size) = jax.typeof(chunks).sharding.spec, chunks.shape[1:3]
    return _reshaped(chunks, (chunks.shape[0], count * size, *chunks.shape[3:]), (*sharding[:2], *sharding[3:]))


def _reshaped(x: Array, shape: tuple[int, ...], sharding: tuple[Any, ...]) -> Array:
    # Since jax 0.11, a reshape forgets how dimensions of size 1 are sharded, such as a single group of heads.
    return x.reshape(shape, out_sharding=PartitionSpec(*sharding)) if any(sharding) else x.reshape(shape)


def whole_chunks(inputs: Inputs, size: int) -> Inputs:
    """Pads tokens, [b, s, ...] each, to whole chunks with zeros: where dt is 0, they leave the state as it is."""
    if not (rest := -inputs[0].shape[1] % size):
        return inputs
    padded = jax.tree.map(lambda v: jnp.pad(v, [(0, 0), (0, rest)] + [(0, 0)] * (v.ndim - 2)), inputs)
    if inputs.segments is None:
        return padded
    # Padding belongs to the last document: by the subtraction, its zeros become that document's number.
    last = inputs.segments[:, -1:]
    return padded._replace(segments=jnp.pad(inputs.segments - last, [(0, 0), (0, rest)]) + last)
