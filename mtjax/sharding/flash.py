"""Flash attention under explicit sharding: every rank runs the kernel on its samples and heads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array, lax
from jax._src.cudnn import fused_attention_stablehlo as fused  # values narrower than keys have no public name
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Float

from mtjax.layout.attention_kernel import WINDOWED
from mtjax.sharding.axes import map_ranks, no_hoist, spec, varying_like
from mtjax.sharding.sinks import gradient_of_sinks, with_sinks

Attend = Callable[[Array, Array, Array], Array]
"""(query, key, value) -> output, each [batch, seq, heads, head_dim]: differentiable, on one device.

Its residuals are these four arrays, one array [batch, heads, seq], and perhaps empty arrays.
"""
Saved = tuple[tuple[Array, Array, Array], Array | None, Any, Array, Array]
"""Query, key and value, sinks, more inputs, output, and the kernel's statistics."""


def cudnn(query: Array, key: Array, value: Array, *, scale: float | None = None, window: int | None = None) -> Array:
    """Runs cuDNN's causal attention, in 16 bits, on one GPU.

    Args:
      query: queries.
      key: keys.
      value: values; narrower than keys on Hopper and newer only.
      scale: of the scores; head_dim^-0.5 when None.
      window: when given, tokens attend to themselves and the window - 1 tokens before them.
    """
    if value.shape[-1] != key.shape[-1]:
        scale, causal = float(query.shape[-1] ** -0.5 if scale is None else scale), fused.MaskType.CAUSAL
        return fused.dot_product_attention(  # pyright: ignore[reportReturnType]
            query, key, value, scale=scale, mask_type=causal, sliding_window_length=window
        )
    # jax counts the tokens before a token, without the token itself.
    near = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=True, local_window_size=near, implementation="cudnn"
    )


class FlashKernel(Protocol):
    """Attention of one rank's samples and heads, which does not materialize the probabilities.

    `more` is a tree of inputs without gradients: [batch, seq] of the tokens, [batch, 2] of random keys, [heads], or
    scalars.
    """

    def __call__(self, query: Array, key: Array, value: Array, more: Any) -> Array:
        """Computes the output."""
        ...

    def forward(self, query: Array, key: Array, value: Array, more: Any) -> tuple[Array, Array]:
        """Computes the output, and statistics [rows, heads, seq] in float32 that `backward` reads."""
        ...

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        more: Any,
        out: Array,
        statistics: Array,
        gradient: Array,
    ) -> tuple[Array, ...]:
        """Computes the gradients of `inputs`: query, key and value. A kernel that observes scores, for the gradient of
        `largest_scores`, also returns the largest of each row, float32 [rows, heads, seq]."""
        ...


@dataclass(frozen=True)
class Differentiable:
    """A kernel that JAX can differentiate."""

    attend: Attend

    def __call__(self, query: Array, key: Array, value: Array, more: Any) -> Array:
        """See `FlashKernel`."""
        del more
        return self.attend(query, key, value)

    def forward(self, query: Array, key: Array, value: Array, more: Any) -> tuple[Array, Array]:
        """See `FlashKernel`; the statistics are a residual of the kernel."""
        del more
        inputs = (query, key, value)
        out, vjp = jax.vjp(self.attend, *inputs)
        # A residual of the vjp function, as the kernel's public call returns its log-sums in 16 bits.
        return out, statistics_of(vjp, (*inputs, out))

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        more: Any,
        out: Array,
        statistics: Array,
        gradient: Array,
    ) -> tuple[Array, Array, Array]:
        """See `FlashKernel`."""
        del more
        # Traces the forward kernel once more for the structure of its vjp function and for empty residuals, whose
        # sharding no `out_specs` can express. The saved arrays replace its results, so it is not compiled.
        recomputed, vjp = jax.vjp(self.attend, *inputs)
        again = statistics_of(vjp, (*inputs, recomputed))
        return with_saved(vjp, (recomputed, out), (again, statistics))(gradient)


@dataclass(frozen=True)
class WindowedOrFull:
    """One of two kernels, by the layer. `more` is whether it has a window, and what both kernels read."""

    windowed: FlashKernel
    full: FlashKernel

    def __call__(self, query: Array, key: Array, value: Array, more: tuple[Array, Any]) -> Array:
        """See `FlashKernel`."""
        run = (partial(kernel, more=more[1]) for kernel in (self.windowed, self.full))
        return either(WINDOWED, more[0], *run, query, key, value)

    def forward(self, query: Array, key: Array, value: Array, more: tuple[Array, Any]) -> tuple[Array, Array]:
        """See `FlashKernel`."""
        run = (partial(kernel.forward, more=more[1]) for kernel in (self.windowed, self.full))
        return either(WINDOWED, more[0], *run, query, key, value)

    def backward(
        self,
        inputs: tuple[Array, Array, Array],
        more: tuple[Array, Any],
        out: Array,
        statistics: Array,
        gradient: Array,
    ) -> tuple[Array, ...]:
        """See `FlashKernel`."""

        def run(kernel: FlashKernel) -> Callable[..., Any]:
            return lambda inputs, out, statistics, gradient: kernel.backward(inputs, more[1], out, statistics, gradient)

        return either(WINDOWED, more[0], run(self.windowed), run(self.full), inputs, out, statistics, gradient)


def either(scope: str, is_first: Array, *arguments: Any) -> Any:
    """Calls the first of two attention kernels if `is_first`, else the second.

    Args:
      scope: `EITHER` or `WINDOWED`, by which `inspect` knows what selects the kernel.
      is_first: equal on all ranks.
      arguments: the two functions, and what is passed to either.
    """
    with jax.named_scope(scope):
        return lax.cond(is_first, *arguments)


def flash_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads value_dim"],
    names: tuple[str, str],
    kernel: FlashKernel,
    more: Any = None,
    sinks: Float[Array, " heads"] | None = None,
    largest_scores: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads value_dim"]:
    """Computes softmax attention without materializing the probabilities.

    Args:
      query: 16 bits for cuDNN; heads / kv_heads consecutive query heads share a key and a value head.
      key: keys.
      value: values.
      names: of the arrays saved for the backward pass: the output, and float32 statistics [rows, heads, seq].
      kernel: of one rank.
      more: a tree of what else the kernel reads, without gradients; see `FlashKernel`.
      sinks: of each head, a logit added to the softmax's denominator; the kernel's statistics are log-sums then.
      largest_scores: zeros, whose gradient is each head's largest score; the kernel observes them then.
    """
    sinks = None if sinks is None else varying_like(sinks, query)
    heads, statistics = spec("batch", "seq", "heads", "head_dim"), spec("batch", "heads", "seq")
    specs = (PartitionSpec(), spec("heads"), spec("batch", "seq"), statistics, heads)
    ranks = _OnRanks(kernel, specs, names, largest_scores is not None)
    return _flash(ranks, query, key, value, sinks, largest_scores, more)


class _OnRanks(NamedTuple):
    """Static arguments of `_flash`: the kernel and shardings."""

    kernel: FlashKernel
    specs: tuple[PartitionSpec, ...]
    """By the number of dimensions: scalars, [heads], [batch, seq], [batch, heads, seq], [batch, seq, heads, width]."""
    names: tuple[str, str]
    observes: bool
    """Whether the kernel returns the largest scores of rows."""

    def map(self, body: Callable[..., Any], dimensions: Any) -> Callable[..., Any]:
        """Maps `body` over the shards of its arguments; `dimensions` are the numbers of its results' dimensions."""
        out_specs = jax.tree.map(self.specs.__getitem__, dimensions)

        def mapped(*inputs: Any) -> Any:
            specs = jax.tree.map(lambda a: self.specs[np.ndim(a)], inputs)
            return map_ranks(body, specs, out_specs)(*inputs)

        return mapped


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(
    ranks: _OnRanks,
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    largest_scores: Array | None,
    more: Any,
) -> Array:
    """Runs the kernel on each rank; returns [batch, seq, heads, value_dim]."""
    if sinks is not None:
        return _flash_forward(ranks, query, key, value, sinks, largest_scores, more)[0]
    return no_hoist(ranks.map(ranks.kernel, 4), query, key, value, more)


def _flash_forward(
    ranks: _OnRanks,
    query: Array,
    key: Array,
    value: Array,
    sinks: Array | None,
    largest_scores: Array | None,
    more: Any,
) -> tuple[Array, Saved]:
    """Runs the kernel; its residuals leave the map as outputs."""
    # Autodiff of a `shard_map` inside the manual region does not lower, so the maps are inside the `custom_vjp`.
    arrays = no_hoist(ranks.map(ranks.kernel.forward, (4, 3)), query, key, value, more)
    if sinks is not None:
        out, log_sums = with_sinks(arrays[0], arrays[1].swapaxes(1, 2), sinks)
        arrays = (out, log_sums.swapaxes(1, 2))
    out, statistics = (checkpoint_name(a, name) for a, name in zip(arrays, ranks.names, strict=True))
    return out, ((query, key, value), sinks, more, out, statistics)


def _flash_backward(ranks: _OnRanks, saved: Saved, gradient: Array) -> tuple[Array | None, ...]:
    """Runs the kernel's backward pass with the saved output and statistics; returns the gradients of query, key, value
    and sinks, and the largest score of each head, [heads], in place of a gradient."""
    inputs, sinks, more, out, statistics = saved
    dimensions = (4, 4, 4, 3) if ranks.observes else (4, 4, 4)
    found = ranks.map(ranks.kernel.backward, dimensions)(inputs, more, out, statistics, gradient)
    of_sinks = None if sinks is None else gradient_of_sinks(out, statistics.swapaxes(1, 2), sinks, gradient)
    # The largest score in this rank's rows: where gradients would be added, over ranks and microbatches, the maximum of
    # these is taken.
    return *found[:3], of_sinks, found[3].max((0, 2)) if ranks.observes else None, None


_flash.defvjp(_flash_forward, _flash_backward)


def type_like(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, *like: Array) -> jax.ShapeDtypeStruct:
    """Returns the type of a rank's array that varies over every manual axis over which some `like` varies."""
    # `pallas_call` does not derive this from its operands.
    axes = frozenset[str]().union(*(jax.typeof(a).mat.varying for a in like))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def statistics_of(vjp: Any, known: tuple[Array, ...]) -> Array:
    """Finds the one residual of a kernel that is neither empty nor among its inputs and outputs, `known`."""
    (found,) = (leaf for leaf in jax.tree.leaves(vjp) if leaf.size and not any(leaf is a for a in known))
    return found


def with_saved(vjp: Any, *pairs: tuple[Array, Array]) -> Any:
    """Returns a vjp function, which is a pytree of its residuals, with others: pairs of (residual, saved array)."""
    return jax.tree.map(lambda leaf: next((saved for old, saved in pairs if leaf is old), leaf), vjp)
