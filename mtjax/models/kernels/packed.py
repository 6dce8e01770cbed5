"""cuDNN's flash attention within the documents of packed samples, on Hopper and newer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo as fused  # packed samples have no public name
from jaxtyping import Bool, Int

from mtjax.layout.attention_kernel import EITHER
from mtjax.models.kernels.in_blocks import InBlocks, Inputs
from mtjax.sharding.flash import either, with_saved

Attend = Callable[..., Array]
"""(query, key, value, lengths, starts, scale=, window=) -> output; all heads have a key and a value."""


def cudnn(
    query: Array, key: Array, value: Array, lengths: Array, starts: Array, *, scale: float, window: int | None
) -> Array:
    """Runs cuDNN's causal attention within documents, in 16 bits, on one GPU; see `documents`."""
    return fused.dot_product_attention(  # pyright: ignore[reportReturnType]
        *(query, key, value),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scale,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )


@dataclass(frozen=True)
class Packed:
    """Attention within at most so many documents of a sample; of samples with more, in blocks by XLA.

    A `FlashKernel` that reads the documents' ids [batch, seq]. cuDNN's statistics are of each document,
    [batch * most, heads, seq]; those of the blocks are in the first rows.
    """

    scale: float
    window: int | None
    most: int
    """Documents of a sample for which cuDNN's kernel has statistics."""
    attend: Attend = cudnn

    def __call__(self, query: Array, key: Array, value: Array, more: Array) -> Array:
        """See `FlashKernel`."""
        return self.forward(query, key, value, more)[0]

    def forward(self, query: Array, key: Array, value: Array, more: Array) -> tuple[Array, Array]:
        """See `FlashKernel`."""
        starts, lengths, fits = documents(more, self.most)

        def packed(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
            key, value = (_repeated(a, query.shape[2]) for a in (key, value))
            out, vjp = jax.vjp(self._packed(lengths, starts), query, key, value)
            return out, _statistics(vjp)

        def in_blocks(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
            out, log_sums = self._blocks.forward(query, key, value, self._inputs(more))
            # Both branches return arrays of one shape: that of cuDNN's statistics.
            return out, jnp.pad(log_sums, ((0, (self.most - 1) * len(log_sums)), (0, 0), (0, 0)))

        return either(EITHER, fits, packed, in_blocks, query, key, value)

    def backward(
        self, inputs: tuple[Array, Array, Array], more: Array, out: Array, statistics: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """See `FlashKernel`."""
        starts, lengths, fits = documents(more, self.most)
        kv_heads = inputs[1].shape[2]

        def packed(inputs: tuple[Array, Array, Array], out: Array, statistics: Array, gradient: Array) -> tuple:
            """Runs the backward kernel on saved arrays; returns the gradients of query, key and value."""
            query, key, value = (_repeated(a, inputs[0].shape[2]) for a in inputs)
            # As in `Differentiable.backward`: the saved arrays replace the results of the forward kernel.
            recomputed, vjp = jax.vjp(self._packed(lengths, starts), query, key, value)
            saved = with_saved(vjp, (recomputed, out), (_statistics(vjp), statistics))
            d_query, d_key, d_value = saved(gradient)
            return d_query, _summed(d_key, kv_heads), _summed(d_value, kv_heads)

        def in_blocks(inputs: tuple[Array, Array, Array], out: Array, statistics: Array, gradient: Array) -> tuple:
            log_sums = statistics[: len(out)]
            return self._blocks.backward(inputs, self._inputs(more), out, log_sums, gradient)

        return either(EITHER, fits, packed, in_blocks, inputs, out, statistics, gradient)

    def _packed(self, lengths: Array, starts: Array) -> Callable[[Array, Array, Array], Array]:
        return partial(self.attend, lengths=lengths, starts=starts, scale=self.scale, window=self.window)

    @property
    def _blocks(self) -> InBlocks:
        return InBlocks(self.scale, is_causal=True, softcap=None, alibi=None, rate=0.0, observes=False)

    def _inputs(self, segments: Array) -> Inputs:
        return Inputs(segments, None if self.window is None else jnp.asarray(self.window), None, None)


def documents(
    segments: Int[Array, "batch seq"], most: int
) -> tuple[Int[Array, "batch starts"], Int[Array, "batch most"], Bool[Array, ""]]:
    """Returns the documents of samples, as cuDNN's kernel reads them.

    Args:
      segments: ids of the tokens' documents, each of adjacent tokens.
      most: documents of a sample.

    Returns:
      The starts of documents [batch, most + 1] and their lengths [batch, most], -1 where there are fewer; and whether
      no sample has more.
    """
    is_start = segments[:, 1:] != segments[:, :-1]
    # The first token begins a document.
    is_start = jnp.pad(is_start, ((0, 0), (1, 0)), constant_values=True)
    # One more than allowed, which tells whether a sample has too many.
    find = partial(jnp.nonzero, size=most + 1, fill_value=-1)
    starts = jax.vmap(lambda row: find(row)[0])(is_start).astype(jnp.int32)
    ends = jnp.where(starts[:, 1:] < 0, segments.shape[1], starts[:, 1:])
    lengths = jnp.where(starts[:, :-1] < 0, -1, ends - starts[:, :-1])
    return starts, lengths, (starts[:, -1] < 0).all()


def _repeated(a: Array, heads: int) -> Array:
    """Repeats keys or values for the heads that share them."""
    # jax 0.10 computes the offsets of documents in keys from the number of query heads (jax-ml/jax#39521).
    return jnp.repeat(a, heads // a.shape[2], axis=2)


def _summed(a: Array, kv_heads: int) -> Array:
    """Adds the gradients of a key or value from the heads that share it."""
    grouped = a.reshape(*a.shape[:2], kv_heads, -1, a.shape[3])
    return grouped.sum(3, dtype=jnp.float32).astype(a.dtype)


def _statistics(vjp: Any) -> Array:
    """Finds the kernel's statistics among its residuals: the only array of three dimensions."""
    (found,) = (leaf for leaf in jax.tree.leaves(vjp) if leaf.ndim == 3)
    return found
