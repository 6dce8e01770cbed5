"""Experts' products: pairs of a token and an expert, sorted by expert and cut into blocks of one expert each.

A loop over the blocks, as many as there are pairs for, gathers a block's tokens, runs its expert on them and adds what
comes out to the tokens' sums: no product is computed that no token asked for, but for the rest of each expert's last
block, and nothing that is as wide as an expert's inner layer is ever longer than a block. Forward and backward are
loops of a length known at run time, which autodiff could not turn round.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.models.activations import ACTIVATIONS
from mtjax.sharding.axes import varying_like

LONGEST, SHORTEST = 1024, 8
"""Rows of a block, at most and at least."""
BLOCKS_OF_AN_EXPERT = 8
"""Into which the pairs of an expert with the mean load are cut at least, if blocks are not the shortest."""


class Blocks(NamedTuple):
    """`mtjax.sharding.experts.Product`, block by block."""

    activation: str
    num_experts: int
    """Of the model, from which the mean load follows."""

    def __call__(self, x: Array, gates: Array, experts: Array, up: Array, down: Array) -> Array:
        """As `Product` says."""
        here = (experts >= 0) & (experts < up.shape[0])
        owners = jnp.where(here, experts, up.shape[0]).reshape(-1)
        run = _Run(ACTIVATIONS[self.activation], self.rows(owners.size), experts.shape[1])
        return _blocked(run, x, gates.reshape(-1), owners, up, down)

    def rows(self, pairs: int) -> int:
        """Of a block, a power of two."""
        share = pairs // (self.num_experts * BLOCKS_OF_AN_EXPERT)
        return min(max(1 << max(share.bit_length() - 1, 0), SHORTEST), LONGEST)


class _Run(NamedTuple):
    activation: Callable[[Array], Array]
    rows: int
    """Of a block."""
    chosen: int
    """Pairs of a token, which stand together."""

    def hidden(self, x: Array, up: Array) -> Array:
        """[rows, embed] and one expert's [embed, ...] -> [rows, mlp]."""
        return self.activation(jnp.tensordot(x, up, 1)[None])[0]


class _Block(NamedTuple):
    expert: Int[Array, ""]
    pairs: Int[Array, " rows"]
    tokens: Int[Array, " rows"]
    """As many as there are, a number behind the last, where the block has no pair."""
    is_pair: Bool[Array, " rows"]


class _Cut(NamedTuple):
    """All pairs, cut into blocks."""

    run: _Run
    order: Int[Array, " pairs"]
    """Pairs sorted by their experts; those of experts that are not here last. Filled up by a block."""
    counts: Int[Array, " expert"]
    ends: Int[Array, " expert"]
    """Blocks up to the last of each expert."""
    tokens: int

    @classmethod
    def of(cls, run: _Run, owners: Array, experts: int) -> "_Cut":
        order = jnp.argsort(owners, stable=True).astype(jnp.int32)
        counts = jnp.zeros(experts, jnp.int32).at[owners].add(1, mode="drop")
        filled = jnp.concatenate([order, jnp.zeros(run.rows, jnp.int32)])
        return cls(run, filled, counts, jnp.cumsum(-(-counts // run.rows)), owners.size // run.chosen)

    @property
    def number(self) -> Array:
        """Of blocks."""
        return self.ends[-1]

    def block(self, i: Array) -> _Block:
        """The i-th."""
        size = self.run.rows
        expert = jnp.searchsorted(self.ends, i, side="right")
        count = self.counts[expert]
        start = (i - self.ends[expert] + -(-count // size)) * size
        first = jnp.cumsum(self.counts)[expert] - count
        pairs = lax.dynamic_slice_in_dim(self.order, first + start, size)
        is_pair = start + jnp.arange(size) < count
        return _Block(expert, pairs, jnp.where(is_pair, pairs // self.run.chosen, self.tokens), is_pair)


def _taken(x: Array, rows: Array) -> Array:
    return x.at[rows].get(mode="fill", fill_value=0)


def _added(x: Array, rows: Array, values: Array) -> Array:
    return x.at[rows].add(values, mode="drop", unique_indices=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    run: _Run,
    x: Float[Array, "tokens embed"],
    gates: Float[Array, " pairs"],
    owners: Int[Array, " pairs"],
    up: Array,
    down: Array,
) -> Float[Array, "tokens embed"]:
    cut = _Cut.of(run, owners, up.shape[0])

    def one(i: Array, y: Array) -> Array:
        block = cut.block(i)
        hidden = run.hidden(_taken(x, block.tokens), up[block.expert])
        out = jnp.dot(hidden, down[block.expert], preferred_element_type=jnp.float32)
        return _added(y, block.tokens, out * gates[block.pairs][:, None])

    zeros = varying_like(jnp.zeros(x.shape, jnp.float32), x, up, gates)
    return lax.fori_loop(0, cut.number, one, zeros).astype(x.dtype)  # here: else its gradient would come as wide


def _blocked_forward(run: _Run, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _blocked(run, *arrays), arrays


def _blocked_backward(run: _Run, saved: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    """Sums in float32; an expert's matrices get theirs block by block."""
    x, gates, owners, up, down = saved
    cut = _Cut.of(run, owners, up.shape[0])
    wide = partial(jnp.dot, preferred_element_type=jnp.float32)

    def one(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        of_x, of_gates, of_up, of_down = sums
        block = cut.block(i)
        expert, gate = block.expert, gates[block.pairs][:, None]
        rows, of_out = _taken(x, block.tokens), _taken(gradient, block.tokens)
        hidden, pull = jax.vjp(run.hidden, rows, up[expert])
        of_hidden = wide(of_out, down[expert].T)  # before the gate
        of_gate = (hidden.astype(jnp.float32) * of_hidden).sum(-1)
        of_rows, of_this_up = pull((of_hidden * gate).astype(x.dtype))
        of_this_down = wide(hidden.T, (of_out * gate).astype(x.dtype))
        pairs = jnp.where(block.is_pair, block.pairs, len(gates))
        return (
            _added(of_x, block.tokens, of_rows.astype(jnp.float32)),
            of_gates.at[pairs].set(of_gate, mode="drop", unique_indices=True),
            of_up.at[expert].add(of_this_up.astype(jnp.float32)),
            of_down.at[expert].add(of_this_down),
        )

    zeros = tuple(varying_like(jnp.zeros(a.shape, jnp.float32), x, up, gradient) for a in (x, gates, up, down))
    sums = lax.fori_loop(0, cut.number, one, zeros)
    of_x, of_gates, of_up, of_down = (a.astype(b.dtype) for a, b in zip(sums, (x, gates, up, down), strict=True))
    return of_x, of_gates, None, of_up, of_down


_blocked.defvjp(_blocked_forward, _blocked_backward)
