"""Flash attention with dropout on probabilities, in Pallas: scores and masks stay in a multiprocessor's registers."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from mtjax.layout.attention_kernel import (
    CAUSAL,
    FORWARD,
    HIDDEN_SCORE,
    KEYS_BACKWARD,
    PALLAS_BLOCK,
    QUERIES_BACKWARD,
    padded_width,
)
from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.kernels import in_blocks
from mtjax.models.kernels.blocks import dropout_of
from mtjax.models.kernels.in_blocks import Inputs
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.saved_names import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.models.threefry import threefry
from mtjax.sharding.flash import flash_attention, type_like


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes self-attention, causal or not, within documents or not.

    It has no bias, cap, window or sinks: `mtjax.layout.attention_kernel` chooses it only for models without these.
    """
    assert context.bias is None and context.positions is None and options.window is None
    assert options.sinks is None and not options.adjusts_scores
    if query.shape[1] % PALLAS_BLOCK:  # other samples than the model's are trained on, as those of a task
        return in_blocks.attend(query, key, value, context, options)
    kernel = Pallas(options.scale_of(query.shape[-1]), context.is_causal, options.dropout_rate)
    inputs = Inputs(context.segment_ids, None, None, dropout_of(query, context, options))
    return flash_attention(query, key, value, (ATTENTION_OUTPUT, ATTENTION_STATISTICS), kernel, inputs)


@dataclass(frozen=True)
class Pallas:
    """A `FlashKernel` whose statistics are log-sums.

    A program instance has a block of queries or keys of one head, and loops over the blocks that they meet. Dropout's
    bits are those of `random_halves` for all heads, queries and keys of a sample, as in every other kernel.
    """

    scale: float
    """Of the scores."""
    is_causal: bool
    rate: float
    """Of the dropout on probabilities."""
    interpreted: bool = False
    """Whether XLA runs the kernel operation by operation, on any device: for tests."""

    def __call__(self, query: Array, key: Array, value: Array, more: Inputs) -> Array:
        """See `FlashKernel`."""
        return self.forward(query, key, value, more)[0]

    def forward(self, query: Array, key: Array, value: Array, more: Inputs) -> tuple[Array, Array]:
        """See `FlashKernel`."""
        batch, length, heads, _ = query.shape
        shared = heads // key.shape[2]
        # A program instance has a block of queries of one head, and all keys and values that it loops over.
        widths = _width(query), _width(value)
        whole = lambda width: pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h // shared, 0))  # noqa: E731
        block = lambda width: pl.BlockSpec((None, PALLAS_BLOCK, None, width), lambda i, h, b: (b, i, h, 0))  # noqa: E731
        return self._call(
            _forward,
            FORWARD,
            (length // PALLAS_BLOCK, heads, batch),
            (query, key, value, more),
            (block(widths[0]), whole(widths[0]), whole(widths[1]), _specs(more, 1)),
            ((query.shape[:3] + value.shape[3:], query.dtype), ((batch, heads, length), jnp.float32)),
            (block(widths[1]), pl.BlockSpec((None, None, PALLAS_BLOCK), lambda i, h, b: (b, h, i))),
            _Sizes.of(query, value),
        )

    def backward(
        self, inputs: tuple[Array, Array, Array], more: Inputs, out: Array, statistics: Array, gradient: Array
    ) -> tuple[Array, Array, Array]:
        """See `FlashKernel`."""
        query, key, value = inputs
        batch, length, heads, _ = query.shape
        kv_heads = key.shape[2]
        shared, blocks, sizes = heads // kv_heads, length // PALLAS_BLOCK, _Sizes.of(query, value)
        wide, narrow = _width(query), _width(value)
        # Computed outside the kernels, each of which would compute it again for every block that it meets.
        row_sums = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        arrays = (query, key, value, gradient, statistics, row_sums, more)
        # A block of keys reads all queries of the heads that share it.
        every = lambda width: pl.BlockSpec((None, length, shared, width), lambda i, g, b: (b, 0, g, 0))  # noqa: E731
        one = lambda width: pl.BlockSpec((None, PALLAS_BLOCK, None, width), lambda i, g, b: (b, i, g, 0))  # noqa: E731
        rows = pl.BlockSpec((None, shared, length), lambda i, g, b: (b, g, 0))
        # A kernel for each side, whose gradients stay in registers until they are complete: seven matmuls. One kernel
        # for both has five, but adds one side's gradients up in memory.
        d_key, d_value = self._call(
            _backward_of_keys,
            KEYS_BACKWARD,
            (blocks, kv_heads, batch),
            arrays,
            (every(wide), one(wide), one(narrow), every(narrow), rows, rows, _specs(more, shared)),
            ((key.shape, key.dtype), (value.shape, value.dtype)),
            (one(wide), one(narrow)),
            sizes,
        )
        whole = lambda width: pl.BlockSpec((None, length, None, width), lambda i, h, b: (b, 0, h // shared, 0))  # noqa: E731
        rows = pl.BlockSpec((None, None, PALLAS_BLOCK), lambda i, h, b: (b, h, i))
        (d_query,) = self._call(
            _backward_of_queries,
            QUERIES_BACKWARD,
            (blocks, heads, batch),
            arrays,
            (one(wide), whole(wide), whole(narrow), one(narrow), rows, rows, _specs(more, 1)),
            ((query.shape, query.dtype),),
            (one(wide),),
            sizes,
        )
        return d_query, d_key, d_value

    def _call(
        self,
        body: Any,
        name: str,
        grid: tuple[int, ...],
        arrays: tuple[Any, ...],
        in_specs: tuple[Any, ...],
        results: tuple[tuple[tuple[int, ...], Any], ...],
        out_specs: tuple[Any, ...],
        sizes: "_Sizes",
    ) -> Any:
        """Runs a kernel: one program instance for each index of the grid."""
        like, is_of_keys = jax.tree.leaves(arrays), name == KEYS_BACKWARD
        # `mtjax inspect` counts the kernel's FLOPs by its name, as a custom call says none.
        name += CAUSAL if self.is_causal else ""
        kernel = partial(body, replace(sizes, scale=self.scale, is_causal=self.is_causal, rate=self.rate))
        kernel.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
        return pl.pallas_call(
            kernel,
            tuple(type_like(shape, dtype, *like) for shape, dtype in results),
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            # ptxas reports for H100 that with fewer warps or more stages the gradients of keys spill registers.
            compiler_params=triton.CompilerParams(num_warps=8 if is_of_keys else 4, num_stages=1 if is_of_keys else 2),
            interpret=self.interpreted,
            name=name,
        )(*arrays)


def _width(a: Array) -> int:
    """Returns the width of a block of heads: Triton's sizes are powers of two, of which the rest is masked."""
    return padded_width(a.shape[-1])


def _specs(more: Inputs, shared: int) -> Any:
    """Returns what a program instance reads of `more`: its sample's segments and key, and its heads' indices."""
    of_sample = lambda a: pl.BlockSpec((None, a.shape[1]), lambda i, h, b: (b, 0))  # noqa: E731
    of_heads = pl.BlockSpec((shared,), lambda i, h, b: (h,))
    return jax.tree.map(lambda a: of_heads if a.ndim == 1 else of_sample(a), more)


@dataclass(frozen=True)
class _Sizes:
    """Constants of a kernel."""

    length: int
    width: int
    value_width: int
    scale: float = 1.0
    is_causal: bool = True
    rate: float = 0.0

    @staticmethod
    def of(query: Array, value: Array) -> "_Sizes":
        return _Sizes(query.shape[1], query.shape[-1], value.shape[-1])

    @property
    def blocks(self) -> int:
        """Blocks of a sample."""
        return self.length // PALLAS_BLOCK

    def last(self, queries: Array) -> Any:
        """Returns the number of blocks of keys that a block of queries meets."""
        return queries + 1 if self.is_causal else self.blocks

    def load(self, ref: Any, block: Any, width: int, *head: Any) -> Array:
        """Loads a block of rows, of a head where `ref` has several: the columns beyond `width` are zeros."""
        mask = (jnp.arange(ref.shape[-1]) < width)[None, :]
        # Zeros beyond the head's width add nothing to products.
        return triton.load(ref.at[(_rows(block), *head, slice(None))], mask=mask, other=0.0)

    def probabilities(self, query: Array, key: Array, at: tuple[Any, Any], segments: Any) -> Array:
        """Computes masked scores, float32 [queries, keys], of the blocks of queries and keys `at`."""
        scores = _product(query, key, 1, 1) * self.scale
        queries, keys = (block * PALLAS_BLOCK + jnp.arange(PALLAS_BLOCK) for block in at)
        seen = queries[:, None] >= keys[None, :] if self.is_causal else None
        if segments is not None:
            of_queries, of_keys = (segments[_rows(block)] for block in at)
            same = of_queries[:, None] == of_keys[None, :]
            seen = same if seen is None else seen & same
        return scores if seen is None else jnp.where(seen, scores, HIDDEN_SCORE)

    def kept(self, dropout: Any, head: Any, at: tuple[Any, Any]) -> Array | None:
        """Computes dropout's factors, 0 or 1 / `keep_share`, float32 [queries, keys]; None without dropout."""
        if dropout is None:
            return None
        # As `threefry.halves` draws them, with the counter of four neighbours drawn once.
        stride = jnp.uint32(-(-self.length // 4) * 4)
        # Counters of 64 bits in two words of 32: rows beyond what the low word can number count in the high word.
        low_rows = jnp.uint32(2**32 // (-(-self.length // 4) * 4))
        shape = (PALLAS_BLOCK, PALLAS_BLOCK // 4)
        row = lax.broadcasted_iota(jnp.uint32, shape, 0) + (
            dropout.heads[head].astype(jnp.uint32) * jnp.uint32(self.length)
            + jnp.uint32(PALLAS_BLOCK) * lax.convert_element_type(at[0], jnp.uint32)
        )
        column = lax.broadcasted_iota(jnp.uint32, shape, 1) * jnp.uint32(4) + jnp.uint32(
            PALLAS_BLOCK
        ) * lax.convert_element_type(at[1], jnp.uint32)
        index = row % low_rows * stride + column
        words = threefry(dropout.keys, row // low_rows, lax.shift_right_logical(index, jnp.uint32(2)))
        least, factor = jnp.uint32(keep_threshold(self.rate)), jnp.float32(1 / keep_share(self.rate))
        low, high = (
            [jnp.where(half >= least, factor, 0.0) for half in halves]
            for halves in zip(*map(_split, words), strict=True)
        )
        # Four neighbours have the low and the high half of the first word, then those of the second.
        both = jnp.stack([jnp.stack(low, axis=-1), jnp.stack(high, axis=-1)], axis=-1)
        return both.reshape(PALLAS_BLOCK, PALLAS_BLOCK)


def _split(word: Array) -> tuple[Array, Array]:
    """Splits words into halves of 16 bits, the low one first."""
    return word & jnp.uint32(0xFFFF), word >> jnp.uint32(16)


def _rows(block: Any) -> Any:
    return pl.ds(block * PALLAS_BLOCK, PALLAS_BLOCK)


def _product(left: Array, right: Array, left_dimension: int, right_dimension: int) -> Array:
    """Computes a matmul over these dimensions, in float32."""
    dimensions = (((left_dimension,), (right_dimension,)), ((), ()))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def _forward(
    sizes: _Sizes, query_ref: Any, key_ref: Any, value_ref: Any, more: Inputs, out_ref: Any, sums_ref: Any
) -> None:
    """Computes a block of the output, and its rows' log-sums."""
    block = pl.program_id(0)
    query = sizes.load(query_ref, 0, sizes.width)

    def add(keys: Any, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Adds a block of keys to the weighted values [block, value_width], largest scores and sums [block]."""
        mixed, largest, total = carry
        scores = sizes.probabilities(query, sizes.load(key_ref, keys, sizes.width), (block, keys), more.segments)
        # Where all keys so far are hidden, `largest` is HIDDEN_SCORE and weights are 1: the first visible key shrinks
        # them to 0.
        new = jnp.maximum(largest, scores.max(1))
        shrink, weights = jnp.exp(largest - new), jnp.exp(scores - new[:, None])
        # Before dropout: it drops probabilities, which are normalized by all keys.
        total = total * shrink + weights.sum(1)
        factors = sizes.kept(more.dropout, 0, (block, keys))
        weights = weights if factors is None else weights * factors
        value = sizes.load(value_ref, keys, sizes.value_width)
        return mixed * shrink[:, None] + _product(weights.astype(value.dtype), value, 1, 0), new, total

    start = jnp.zeros((PALLAS_BLOCK, value_ref.shape[-1]), jnp.float32)
    least, none = jnp.full((PALLAS_BLOCK,), HIDDEN_SCORE, jnp.float32), jnp.zeros((PALLAS_BLOCK,), jnp.float32)
    mixed, largest, total = lax.fori_loop(0, sizes.last(block), add, (start, least, none))
    _store(out_ref, mixed / total[:, None], sizes.value_width)
    sums_ref[...] = largest + jnp.log(total)


def _store(ref: Any, block: Array, width: int) -> None:
    """Stores the columns up to `width`."""
    mask = (jnp.arange(ref.shape[-1]) < width)[None, :]
    triton.store(ref, block.astype(ref.dtype), mask=mask)


def _scores_backward(
    sizes: _Sizes, query: Array, key: Array, value: Array, gradient: Array, row: tuple[Array, Array], more: Any, at: Any
) -> tuple[Array, Array]:
    """Computes probabilities after dropout, and the gradients of scaled products; `row` are log-sums and row sums.

    `more` are segments, dropout and the head.
    """
    segments, dropout, head = more
    probabilities = jnp.exp(sizes.probabilities(query, key, at, segments) - row[0][:, None])
    factors = sizes.kept(dropout, head, at)
    d_probabilities = _product(gradient, value, 1, 1)
    dropped = probabilities if factors is None else probabilities * factors
    d_probabilities = d_probabilities if factors is None else d_probabilities * factors
    return dropped, probabilities * (d_probabilities - row[1][:, None]) * sizes.scale


def _backward_of_keys(
    sizes: _Sizes,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gradient_ref: Any,
    sums_ref: Any,
    row_sums_ref: Any,
    more: Inputs,
    d_key_ref: Any,
    d_value_ref: Any,
) -> None:
    """Computes the gradients of a block of keys and values: sums over the queries of all heads that share them."""
    block = pl.program_id(0)
    key, value = sizes.load(key_ref, 0, sizes.width), sizes.load(value_ref, 0, sizes.value_width)
    # Queries before a block of keys don't see it.
    first = block if sizes.is_causal else 0
    count = sizes.blocks - first

    def add(step: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds what a block of queries of a head contributes to the gradients of a block of keys and values."""
        d_key, d_value = carry
        head, queries = lax.div(step, count), first + lax.rem(step, count)
        query = sizes.load(query_ref, queries, sizes.width, head)
        gradient = sizes.load(gradient_ref, queries, sizes.value_width, head)
        row = sums_ref[head, _rows(queries)], row_sums_ref[head, _rows(queries)]
        of_head = more.segments, more.dropout, head
        dropped, d_scores = _scores_backward(sizes, query, key, value, gradient, row, of_head, (queries, block))
        d_value += _product(dropped.astype(gradient.dtype), gradient, 0, 0)
        return d_key + _product(d_scores.astype(query.dtype), query, 0, 0), d_value

    zeros = tuple(jnp.zeros((PALLAS_BLOCK, ref.shape[-1]), jnp.float32) for ref in (key_ref, value_ref))
    d_key, d_value = lax.fori_loop(0, count * query_ref.shape[1], add, zeros)
    _store(d_key_ref, d_key, sizes.width)
    _store(d_value_ref, d_value, sizes.value_width)


def _backward_of_queries(
    sizes: _Sizes,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    gradient_ref: Any,
    sums_ref: Any,
    row_sums_ref: Any,
    more: Inputs,
    d_query_ref: Any,
) -> None:
    """Computes the gradient of a block of queries."""
    block = pl.program_id(0)
    query, gradient = sizes.load(query_ref, 0, sizes.width), sizes.load(gradient_ref, 0, sizes.value_width)
    row, of_head = (sums_ref[...], row_sums_ref[...]), (more.segments, more.dropout, 0)

    def add(keys: Any, d_query: Array) -> Array:
        key, value = sizes.load(key_ref, keys, sizes.width), sizes.load(value_ref, keys, sizes.value_width)
        _, d_scores = _scores_backward(sizes, query, key, value, gradient, row, of_head, (block, keys))
        return d_query + _product(d_scores.astype(key.dtype), key, 1, 0)

    zeros = jnp.zeros((PALLAS_BLOCK, query_ref.shape[-1]), jnp.float32)
    _store(d_query_ref, lax.fori_loop(0, sizes.last(block), add, zeros), sizes.width)
