"""The gated delta rule in chunks (arXiv 2412.06464): products inside chunks, and a state that passes through them.

`S_t = exp(g_t) S_(t-1) (I - beta_t k_t k_t') + beta_t v_t k_t'` and `y_t = S_t q_t`, for every head, with a state
[value width, key width] each: a token replaces beta of what the state holds at its key.

Within a chunk, the values that tokens write, less what they read of the state and of each other, are the solution of a
triangular system (the WY representation of arXiv 2406.06484), whose inverse is computed once for all heads and chunks.

Letters of shapes: b samples, s tokens, c chunks of q tokens, u groups of heads that share queries and keys, h heads of
a group, p width of a value, n width of a key. Decays g are logarithms; decays, inverses and states are float32,
products are computed in the type of the values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.models.kernels.ssd import HIGHEST, between, in_chunks, joined, to_last, whole_chunks, wide_einsum
from mtjax.sharding.axes import spec, varying_like, where


class DeltaInputs(NamedTuple):
    """What the rule reads of each token."""

    query: Float[Array, "b s u n"]
    key: Float[Array, "b s u n"]
    """Of length 1."""
    value: Float[Array, "b s u h p"]
    decay: Float[Array, "b s u h"]
    """g: float32, 0 or less."""
    beta: Float[Array, "b s u h"]
    """float32, between 0 and 1."""
    segments: Int[Array, "b s"] | None = None
    """Document of each token: no state passes from one to the next."""


def delta_scan(
    inputs: DeltaInputs, size: int, at_once: int, state: Float[Array, "b u h p n"] | None = None
) -> tuple[Float[Array, "b s u h p"], Float[Array, "b u h p n"]]:
    """Runs the recurrence over all tokens.

    Args:
      inputs: of the tokens.
      size: tokens of a chunk.
      at_once: chunks whose products within are alive at the same time; longer samples go through a loop.
      state: that comes in; zeros when None.

    Returns:
      What is read of the states, in the type of the values, and the last state, float32.
    """
    if state is None:
        state = _constant_state(inputs, jnp.zeros((inputs.key.shape[-1], inputs.value.shape[-1])))
    else:
        # The loops have the key first, as products of chunks read it; caches have the value first, as in Mamba-2.
        state = jnp.swapaxes(state, -1, -2)
    y, state = _pass_chunks(inputs, size, at_once, state, None)
    return y, jnp.swapaxes(state, -1, -2)


class Passage(NamedTuple):
    """What tokens do to a state that comes in, S, whatever it is: they read and leave affine functions of it."""

    without_state: Float[Array, "b s u h p"]
    """What is read where S is 0."""
    reads: Float[Array, "b s u h n"]
    """Meets S, and gives what is read of it besides."""
    leaves: Float[Array, "b u h n p+n"]
    """[B T]: B + T S is left, float32."""

    def read(self, state: Float[Array, "b u h n p"]) -> Float[Array, "b s u h p"]:
        """Computes what the tokens read where a state comes in, which has the type of the values."""
        # XLA: for CPUs it has no such product of 16-bit types where tokens come before the heads.
        of_state = wide_einsum("buhsn,buhnp->buhsp", jnp.moveaxis(self.reads, 1, 3), state)
        return (self.without_state.astype(jnp.float32) + jnp.moveaxis(of_state, 3, 1)).astype(self.without_state.dtype)


def delta_passage(inputs: DeltaInputs, size: int, at_once: int, before: Int[Array, " b"] | None) -> Passage:
    """Runs the recurrence over all tokens for any state that comes in: for zeros, and beside them for the identity.

    The loop over chunks, whose steps take their latency, runs once; what is read of the state is one product after it.

    Args:
      inputs: of the tokens.
      size: tokens of a chunk.
      at_once: see `delta_scan`.
      before: document of the token before the first, with the tokens' `segments`.
    """
    key, width = inputs.key.shape[-1], inputs.value.shape[-1]
    y, state = _pass_chunks(inputs, size, at_once, _constant_state(inputs, jnp.eye(key, width + key, width)), before)
    return Passage(y[..., :width], y[..., width:], state)


def _constant_state(inputs: DeltaInputs, state: Float[Array, "n columns"]) -> Float[Array, "b u h n columns"]:
    """Returns the same state for every head."""
    batch, _, groups, heads, _ = inputs.value.shape
    shape, sharding = (batch, groups, heads, *state.shape), spec("batch", "heads", None, None, None)
    return varying_like(jnp.broadcast_to(state, shape, out_sharding=sharding), inputs.value)


def _pass_chunks(
    inputs: DeltaInputs, size: int, at_once: int, state: Float[Array, "b u h n columns"], before: Array | None
) -> tuple[Float[Array, "b s u h columns"], Float[Array, "b u h n columns"]]:
    """Passes a state through all chunks: its columns meet the values', and any more columns values of 0."""
    length = inputs.value.shape[1]
    size = min(size, length)
    # With decay and beta 0, padding leaves the state as it is.
    inputs = whole_chunks(inputs, size)
    count = inputs.value.shape[1] // size
    # The most chunks of a block that divide them into equal blocks.
    at_once = next(n for n in range(min(at_once, count), 0, -1) if count % n == 0)
    if before is None and inputs.segments is not None:
        before = inputs.segments[:, 0]

    def block(carry: tuple[Array, Array | None], block_inputs: DeltaInputs) -> tuple[tuple[Array, Array | None], Array]:
        """Passes the state through the chunks of a block; returns it, and the block's outputs."""
        state, before = carry
        # A step saves the state that comes in, and recomputes its products in the backward pass.
        state, y = lax.scan(jax.checkpoint(_pass_chunk), state, _Chunk.all_of(block_inputs, size, before))
        # [c b u h q p] -> [b c q u h p]
        y = joined(jnp.transpose(y, (1, 0, 4, 2, 3, 5)))
        return (state, None if block_inputs.segments is None else block_inputs.segments[:, -1]), y

    if at_once == count:
        (state, _), y = block((state, before), inputs)
        return y[:, :length], state
    blocks = jax.tree.map(lambda v: _cut(v, at_once * size), inputs)
    # A block saves the state that comes in, and what all chunks read of each other is alive for one block at a time.
    (state, _), y = lax.scan(jax.checkpoint(block), (state, before), blocks)
    return joined(jnp.moveaxis(y, 0, 1))[:, :length], state


def delta_step(
    inputs: DeltaInputs, state: Float[Array, "b u h p n"]
) -> tuple[Float[Array, "b 1 u h p"], Float[Array, "b u h p n"]]:
    """Runs the recurrence for one token of each sequence, in float32; arguments and results as of `delta_scan`."""
    query, key, value, decay, beta = (v[:, 0].astype(jnp.float32) for v in inputs[:5])
    state = jnp.exp(decay)[..., None, None] * state
    # Read from the decayed state: the token replaces part of what is left at its key, not of what was there before.
    held = jnp.einsum("buhpn,bun->buhp", state, key, precision=HIGHEST)
    written = (value - held) * beta[..., None]
    state = state + written[..., None] * key[:, :, None, None]
    y = jnp.einsum("buhpn,bun->buhp", state, query, precision=HIGHEST)
    return y[:, None].astype(inputs.value.dtype), state


class _Chunk(NamedTuple):
    """What the loop over chunks reads of one; of all of them with a dimension c before the others."""

    # XLA: each step of the loop is a few short kernels, which take their latency. So matrices that meet the same
    # operand are one, and decays are multiplied into them before.
    readers: Float[Array, "b u h q+q n"]
    """Meets the state that comes in: what tokens write less for it, then their queries. Rows of other documents than
    the state's are 0."""
    written: Float[Array, "b u h q p"]
    """What the tokens write if no state comes in, float32."""
    takers: Float[Array, "b u h q+n q"]
    """Meets what the tokens write: what each reads of it, then what it leaves in the state. Columns of other documents
    than the last token's are 0 in the latter."""
    total: Float[Array, "b u h"]
    """Decay of the state that comes in, at the chunk's end; 0 if another document has begun."""

    @classmethod
    def all_of(cls, inputs: DeltaInputs, size: int, before: Array | None) -> "_Chunk":
        """Computes what needs no state, for all chunks; `before` is the document of the token before the first."""
        query, key, value, decay, beta, segments = jax.tree.map(lambda v: _cut(v, size), inputs)
        # XLA: a product with a triangle: prefix sums are slow on CPUs, and take several kernels on GPUs.
        triangle = jnp.tril(jnp.ones((size, size), jnp.float32))
        until = jnp.einsum("qk,cbkuh->cbuhq", triangle, decay, precision=HIGHEST)
        sees = jnp.tril(jnp.ones((size, size), bool))[None, None, None, None]
        from_start, to_end, total = jnp.exp(until), jnp.exp(to_last(until)), jnp.exp(until[..., -1])
        if segments is not None:
            assert before is not None
            last = segments[:, :, -1]
            earlier = jnp.concatenate([before[None], last[:-1]])
            sees = sees & (segments[..., :, None] == segments[..., None, :])[:, :, None, None]
            from_start = jnp.where((segments == earlier[..., None])[:, :, None, None], from_start, 0)
            to_end = jnp.where((segments == last[..., None])[:, :, None, None], to_end, 0)
            total = jnp.where((last == earlier)[..., None, None], total, 0)
        # Masked before the exponential: decays to later tokens are positive, and would overflow.
        fades = jnp.exp(where(sees, between(until), -jnp.inf))
        alike, scores = (wide_einsum("cbqun,cbkun->cbuqk", of, key)[:, :, :, None] for of in (key, query))
        # `(I + tril(diag(beta) K K' decays, -1))^-1 diag(beta)`: rows are scaled in the system, columns after it
        # is inverted.
        rates = jnp.moveaxis(beta, 2, -1)
        earlier_tokens = np.tril(np.ones((size, size), bool), -1)
        system = where(jnp.asarray(earlier_tokens)[None, None, None, None], alike * fades, 0.0) * rates[..., None]
        solved = inverse_of_unit_lower(system) * rates[..., None, :]
        dtype = value.dtype
        starts = (solved * from_start[..., None, :]).astype(dtype)
        queries = jnp.moveaxis(query, 2, 3)[:, :, :, None] * from_start[..., None]
        keys = jnp.moveaxis(key, 2, -1)[:, :, :, None] * to_end[..., None, :]
        reads = jnp.einsum("cbuhqk,cbkun->cbuhqn", starts, key)
        return cls(
            jnp.concatenate([reads, queries.astype(dtype)], -2),
            wide_einsum("cbuhqk,cbkuhp->cbuhqp", solved.astype(dtype), value),
            jnp.concatenate([(scores * fades).astype(dtype), keys.astype(dtype)], -2),
            total,
        )


def _pass_chunk(state: Float[Array, "b u h n columns"], chunk: _Chunk) -> tuple[Array, Float[Array, "b u h q columns"]]:
    """Passes the state through a chunk, and computes what its tokens read."""
    dtype, (size, width) = chunk.readers.dtype, chunk.written.shape[-2:]
    held = wide_einsum("buhqn,buhnp->buhqp", chunk.readers, state.astype(dtype))
    values = chunk.written
    if more := state.shape[-1] - width:
        # The identity's columns (`delta_passage`) write nothing of their own.
        values = jnp.pad(values, [(0, 0)] * 4 + [(0, more)])
    written = values - held[..., :size, :]
    taken = wide_einsum("buhqk,buhkp->buhqp", chunk.takers, written.astype(dtype))
    y = held[..., size:, :] + taken[..., :size, :]
    return chunk.total[..., None, None] * state + taken[..., size:, :], y.astype(dtype)


@jax.custom_vjp
def inverse_of_unit_lower(system: Float[Array, "*batch q k"]) -> Float[Array, "*batch q k"]:
    """Inverts `I + system`, strictly lower triangular matrices of float32."""
    # Blocks of 1, 2, 4 ... are inverted from those of half their size, all at once: it is as stable as forward
    # substitution, where a sum of powers would cancel for keys that are alike.
    size = system.shape[-1]
    index = np.arange(size)
    # Blocks of two tokens: their inverse has the negated entry below the diagonal.
    inverse = jnp.eye(size, dtype=system.dtype) - _below(system, index, 1)
    half = 2
    while half < size:
        # [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]; the other blocks of the products are 0.
        below = _product(_product(inverse, _below(system, index, half)), inverse)
        inverse, half = inverse - below, 2 * half
    return inverse


def _below(system: Array, index: np.ndarray, half: int) -> Array:
    """Selects, of blocks twice as large as `half`, what is below the two blocks on their diagonals."""
    block, is_second = index // (2 * half), index // half % 2 == 1
    chosen = (block[:, None] == block) & is_second[:, None] & ~is_second
    return where(jnp.asarray(chosen).reshape((1,) * (system.ndim - 2) + chosen.shape), system, 0.0)


def _inverse_forward(system: Array) -> tuple[Array, Array]:
    inverse = inverse_of_unit_lower(system)
    return inverse, inverse


def _inverse_backward(inverse: Array, gradient: Array) -> tuple[Array]:
    """Computes `-T' G T'`; the caller's mask takes what is on and above the diagonal."""
    back = jnp.einsum("...qi,...qk->...ik", inverse, gradient, precision=HIGHEST)
    return (-jnp.einsum("...ik,...jk->...ij", back, inverse, precision=HIGHEST),)


inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)


def _product(one: Array, other: Array) -> Array:
    return jnp.einsum("...qi,...ik->...qk", one, other, precision=HIGHEST)


def _cut(x: Array, size: int) -> Array:
    """Cuts tokens into pieces: [b, s, ...] -> [pieces, b, size, ...]."""
    return jnp.moveaxis(in_chunks(x, size), 1, 0)
