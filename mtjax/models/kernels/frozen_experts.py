"""Grouped products of experts whose matrices are not trained, perhaps with low-rank adapters (LoRA).

Like `mtjax.models.kernels.grouped`, block by block; but matrices have no gradients, and an expert's adapters are
applied to the tokens of its blocks: `x W + scale (x A) B`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from mtjax.models.kernels.grouped import BlockedArguments, Blocks, Division, add_rows, owners_of
from mtjax.models.ops import activation_of
from mtjax.sharding.axes import varying_like
from mtjax.sharding.experts.ragged_all_to_all import take_rows


class FrozenBlocks(NamedTuple):
    """`mtjax.sharding.experts.dispatch.ExpertCompute`. After up and down, its weights are the biases of up, if any, and
    the adapters' matrices, if any: A and B of up, then of down."""

    activation: str
    num_experts: int
    """Of the model, for the mean load."""
    num_biases: int
    """1, or 0 without biases."""
    scale: float
    """Of the adapters."""

    def __call__(self, x: Array, gates: Array, experts: Array, up: Array, down: Array, *others: Array) -> Array:
        """See `ExpertCompute`."""
        owners = owners_of(experts, up.shape[0])
        rows = Blocks(self.activation, self.num_experts).rows(owners.size)
        run = _Adapted(
            BlockedArguments(activation_of(self.activation), rows, experts.shape[1]), self.num_biases, self.scale
        )
        return _blocked(run, x, gates.reshape(-1), owners, up, down, *others)


class _Adapted(NamedTuple):
    """Static arguments of `_blocked`."""

    run: BlockedArguments
    num_biases: int
    scale: float

    def hidden(self, x: Array, up: Array, biases: tuple[Array, ...], adapter: tuple[Array, ...]) -> Array:
        """Applies one expert's first layer: [rows, embed] -> [rows, mlp]; A is [embed, ..., rank], B [..., rank, mlp],
        where a gated MLP has one of each for the gate and one for the other half."""
        product = jnp.tensordot(x, up, 1)
        if adapter:
            a, b = adapter
            low = self.low(x, a)
            product += jnp.einsum("tgr,grm->tgm", low, b) if b.ndim == 3 else low @ b
        return self.run.activate(product, *biases)

    def low(self, x: Array, a: Array) -> Array:
        """Computes `scale x A`, in the type of x."""
        return (self.scale * jnp.tensordot(x, a, 1, preferred_element_type=jnp.float32)).astype(x.dtype)

    def of_expert(self, expert: Array, others: tuple[Array, ...]) -> tuple[tuple[Array, ...], ...]:
        """Selects an expert's biases, the adapter of its first layer and that of its second."""
        # A gather of one expert's arrays from the stacks: its index is known at run time only.
        each = tuple(array[expert] for array in others)
        adapters = each[self.num_biases :]
        return each[: self.num_biases], adapters[:2], adapters[2:]


_float32 = partial(jnp.dot, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    run: _Adapted, x: Float[Array, "tokens embed"], gates: Array, owners: Array, up: Array, down: Array, *others: Array
) -> Float[Array, "tokens embed"]:
    """Computes each token's sum over its pairs of gate times expert output, accumulated in float32."""
    blocks = Division.of(run.run, owners, up.shape[0])

    def one(i: Array, y: Array) -> Array:
        """Adds the outputs of block i to y [tokens, embed]."""
        block = blocks.block(i)
        biases, first, second = run.of_expert(block.expert, others)
        hidden = run.hidden(take_rows(x, block.tokens), up[block.expert], biases, first)
        out = _float32(hidden, down[block.expert])
        if second:
            out += _float32(run.low(hidden, second[0]), second[1])
        return add_rows(y, block.tokens, out * gates[block.pairs][:, None])

    zeros = varying_like(jnp.zeros(x.shape, jnp.float32), x, up, gates)
    return lax.fori_loop(0, blocks.num_blocks, one, zeros).astype(x.dtype)


def _blocked_forward(run: _Adapted, *arrays: Array) -> tuple[Array, tuple[Array, ...]]:
    return _blocked(run, *arrays), arrays


def _blocked_backward(run: _Adapted, saved: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    """Recomputes each block's inner layer, and accumulates the gradients of tokens, gates and adapters in float32; none
    of owners, matrices and biases."""
    x, gates, owners, up, down, *others = saved
    blocks, adapters = Division.of(run.run, owners, up.shape[0]), others[run.num_biases :]

    def one(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds the gradients of block i to the accumulators."""
        d_x, d_gates, *d_adapters = sums
        block = blocks.block(i)
        expert, gate = block.expert, gates[block.pairs][:, None]
        rows, d_out = take_rows(x, block.tokens), take_rows(gradient, block.tokens)
        biases, first, second = run.of_expert(expert, tuple(others))
        # Differentiated by tokens and adapters alone: the gradient of a frozen matrix would be the largest array.
        hidden, vjp = jax.vjp(lambda rows, *ab: run.hidden(rows, up[expert], biases, ab), rows, *first)
        d_hidden, parts = _float32(d_out, down[expert].T), ()  # without the gate
        gated = (d_out * gate).astype(x.dtype)
        if second:
            a, b = second
            d_hidden += _float32(run.low(d_out, b.T), a.T)
            parts = (_float32(hidden.T, run.low(gated, b.T)), _float32(run.low(hidden, a).T, gated))
        d_gate = (hidden.astype(jnp.float32) * d_hidden).sum(-1)
        d_rows, *of_first = vjp((d_hidden * gate).astype(x.dtype))
        # Padding repeats pairs of other blocks, so it must not write.
        pairs = jnp.where(block.is_pair, block.pairs, len(gates))
        added = zip(d_adapters, (*of_first, *parts), strict=True)
        return (
            add_rows(d_x, block.tokens, d_rows.astype(jnp.float32)),
            d_gates.at[pairs].set(d_gate, mode="drop", unique_indices=True),
            *(total.at[expert].add(part.astype(jnp.float32)) for total, part in added),
        )

    learned = (x, gates, *adapters)
    zeros = tuple(varying_like(jnp.zeros(a.shape, jnp.float32), x, up, gradient) for a in learned)
    sums = lax.fori_loop(0, blocks.num_blocks, one, zeros)
    d_x, d_gates, *d_adapters = (a.astype(b.dtype) for a, b in zip(sums, learned, strict=True))
    return d_x, d_gates, None, None, None, *((None,) * run.num_biases), *d_adapters


_blocked.defvjp(_blocked_forward, _blocked_backward)
