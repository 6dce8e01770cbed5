"""Grouped products of experts: pairs of a token and an expert, sorted by expert, in blocks of one expert each.

A loop over the blocks gathers a block's tokens, applies its expert, and scatter-adds the outputs to the tokens' sums.
The number of blocks is known at run time. No product is computed for no token, except in the padding of each expert's
last block, and no array is both as wide as an expert's inner layer and longer than a block. Loops of dynamic length
have no transpose in autodiff, so the backward pass is a second loop.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.models.ops import activation_of
from mtjax.sharding.axes import varying_like
from mtjax.sharding.experts.ragged_all_to_all import take_rows

LONGEST, SHORTEST = 1024, 8
"""Rows of a block, at most and at least."""
BLOCKS_OF_AN_EXPERT = 8
"""Minimum number of blocks of an expert with the mean load, if blocks are not the shortest."""


class Blocks(NamedTuple):
    """`mtjax.sharding.experts.dispatch.ExpertCompute`, block by block."""

    activation: str
    num_experts: int
    """Of the model, for the mean load."""

    def __call__(self, x: Array, gates: Array, experts: Array, up: Array, down: Array, *biases: Array) -> Array:
        """See `ExpertCompute`."""
        owners = owners_of(experts, up.shape[0])
        run = BlockedArguments(activation_of(self.activation), self.rows(owners.size), experts.shape[1])
        return _blocked(run, x, gates.reshape(-1), owners, up, down, *biases)

    def rows(self, pairs: int) -> int:
        """Returns the rows of a block, a power of two."""
        mean = pairs // (self.num_experts * BLOCKS_OF_AN_EXPERT)
        # An expert's last block is half padding on average: of BLOCKS_OF_AN_EXPERT blocks that is 1/16 of its rows.
        return min(max(1 << max(mean.bit_length() - 1, 0), SHORTEST), LONGEST)


def owners_of(experts: Int[Array, "tokens chosen"], count: int) -> Int[Array, " pairs"]:
    """Returns the expert of each pair, an index into this rank's `count`, which itself stands for other ranks'."""
    # Past the last expert, so that pairs of other ranks' experts are sorted last, and not counted.
    return jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)


class BlockedArguments(NamedTuple):
    """Static arguments of `_blocked`."""

    activation: Callable[[Array], Array]
    rows: int
    """Of a block."""
    chosen: int
    """Pairs of a token, which are consecutive."""

    def hidden(self, x: Array, up: Array, *biases: Array) -> Array:
        """Applies one expert's first layer: [rows, embed], [embed, ...], float32 [...] -> [rows, mlp]."""
        return self.activate(jnp.tensordot(x, up, 1), *biases)

    def activate(self, product: Array, *biases: Array) -> Array:
        """Applies the activation to a product, [rows, ...], after the addition of a bias."""
        for bias in biases:  # one or none
            product = (product.astype(jnp.float32) + bias).astype(product.dtype)
        return self.activation(product[None])[0]


class _Block(NamedTuple):
    """Pairs of one expert."""

    expert: Int[Array, ""]
    pairs: Int[Array, " rows"]
    """Indices of pairs."""
    tokens: Int[Array, " rows"]
    """Indices of their tokens; past the last token in the padding."""
    is_pair: Bool[Array, " rows"]
    """False in the padding."""


class Division(NamedTuple):
    """All pairs, divided into blocks."""

    run: BlockedArguments
    order: Int[Array, " pairs"]
    """Indices of pairs sorted by expert, those of other ranks' experts last; padded by a block."""
    counts: Int[Array, " expert"]
    """Pairs of each expert."""
    ends: Int[Array, " expert"]
    """Number of blocks of each expert and all before it."""
    tokens: int
    """Their number."""

    @classmethod
    def of(cls, run: BlockedArguments, owners: Array, experts: int) -> "Division":
        """Sorts pairs by expert.

        Args:
          run: static arguments.
          owners: int32 [pairs], the expert of each pair; `experts` for those of other ranks.
          experts: of this rank.
        """
        order = jnp.argsort(owners, stable=True).astype(jnp.int32)
        # Each expert has ceil(count / rows) blocks, so that no block has pairs of two experts.
        counts = jnp.zeros(experts, jnp.int32).at[owners].add(1, mode="drop")
        # The last block's slice would otherwise start earlier, as `dynamic_slice` clamps indices, and read pairs of
        # other experts.
        padded = jnp.concatenate([order, jnp.zeros(run.rows, jnp.int32)])
        return cls(run, padded, counts, jnp.cumsum(-(-counts // run.rows)), owners.size // run.chosen)

    @property
    def num_blocks(self) -> Array:
        """Number of blocks."""
        return self.ends[-1]

    def block(self, i: Array) -> _Block:
        """Returns the i-th block."""
        size = self.run.rows
        # Blocks are ordered by expert: `ends` are the cumulative numbers of blocks.
        expert = jnp.searchsorted(self.ends, i, side="right")
        count = self.counts[expert]
        # `start` is the block's offset within its expert's pairs, `first` that of the expert's pairs in `order`.
        start = (i - self.ends[expert] + -(-count // size)) * size
        first = jnp.cumsum(self.counts)[expert] - count
        pairs = lax.dynamic_slice_in_dim(self.order, first + start, size)
        is_pair = start + jnp.arange(size) < count
        return _Block(expert, pairs, jnp.where(is_pair, pairs // self.run.chosen, self.tokens), is_pair)


def add_rows(x: Array, rows: Array, values: Array) -> Array:
    """Adds values to different rows of x; those past the last are dropped."""
    return x.at[rows].add(values, mode="drop", unique_indices=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    run: BlockedArguments,
    x: Float[Array, "tokens embed"],
    gates: Float[Array, " pairs"],
    owners: Int[Array, " pairs"],
    up: Array,
    down: Array,
    *biases: Array,
) -> Float[Array, "tokens embed"]:
    """Computes each token's sum over its pairs of gate times expert output, accumulated in float32."""
    blocks = Division.of(run, owners, up.shape[0])

    def one(i: Array, y: Array) -> Array:
        """Adds the outputs of block i to y [tokens, embed]."""
        # The block's expert is known at run time only, so its matrices are gathered from the stack.
        block = blocks.block(i)
        hidden = run.hidden(take_rows(x, block.tokens), up[block.expert], *(bias[block.expert] for bias in biases))
        out = jnp.dot(hidden, down[block.expert], preferred_element_type=jnp.float32)
        return add_rows(y, block.tokens, out * gates[block.pairs][:, None])

    # A token's pairs may be in different blocks, so its output is accumulated, in float32.
    zeros = varying_like(jnp.zeros(x.shape, jnp.float32), x, up, gates)
    return lax.fori_loop(0, blocks.num_blocks, one, zeros).astype(
        x.dtype
    )  # cast inside the custom_vjp, so that the gradient has this type too


def _blocked_forward(run: BlockedArguments, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _blocked(run, *arrays), arrays


def _blocked_backward(run: BlockedArguments, saved: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    """Recomputes each block's inner layer, and accumulates the gradients of all but owners in float32.

    With h the expert's inner layer and y = gate (h down): d gate = h . (dy down'), d h = gate (dy down'), d down = h'
    (gate dy).
    """
    x, gates, owners, up, down, *biases = saved
    blocks = Division.of(run, owners, up.shape[0])
    dot_float32 = partial(jnp.dot, preferred_element_type=jnp.float32)

    def one(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds the gradients of block i to the accumulators."""
        d_x, d_gates, d_up, d_down, *d_biases = sums
        block = blocks.block(i)
        expert, gate = block.expert, gates[block.pairs][:, None]
        rows, d_out = take_rows(x, block.tokens), take_rows(gradient, block.tokens)
        hidden, vjp = jax.vjp(run.hidden, rows, up[expert], *(bias[expert] for bias in biases))
        d_hidden = dot_float32(d_out, down[expert].T)  # without the gate
        d_gate = (hidden.astype(jnp.float32) * d_hidden).sum(-1)
        d_rows, block_d_up, *block_d_biases = vjp((d_hidden * gate).astype(x.dtype))
        block_d_down = dot_float32(hidden.T, (d_out * gate).astype(x.dtype))
        # Padding repeats pairs of other experts, so it must not write.
        pairs = jnp.where(block.is_pair, block.pairs, len(gates))
        return (
            add_rows(d_x, block.tokens, d_rows.astype(jnp.float32)),
            d_gates.at[pairs].set(d_gate, mode="drop", unique_indices=True),
            # A block's gradients are added to those of its expert's other blocks.
            d_up.at[expert].add(block_d_up.astype(jnp.float32)),
            d_down.at[expert].add(block_d_down),
            *(total.at[expert].add(part) for total, part in zip(d_biases, block_d_biases, strict=True)),
        )

    learned = (x, gates, up, down, *biases)
    zeros = tuple(varying_like(_zeros_like(a), x, up, gradient) for a in learned)
    sums = lax.fori_loop(0, blocks.num_blocks, one, zeros)
    d_x, d_gates, *d_weights = (a.astype(b.dtype) for a, b in zip(sums, learned, strict=True))
    return d_x, d_gates, None, *d_weights


def _zeros_like(a: Array) -> Array:
    """Returns float32 zeros that depend on `a`."""
    # XLA: other zeros would be shared by all layers in one iteration of a loop, and copied for each but the last. It
    # removes barriers before it merges equal constants.
    return (a > jnp.inf).astype(jnp.float32)


_blocked.defvjp(_blocked_forward, _blocked_backward)
