"""cuDNN's flash attention: causal, in 16 bits, on GPUs; probabilities are not materialized."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from mtjax.layout.attention_kernel import documents_at_most
from mtjax.models.kernels import packed
from mtjax.models.kernels.blocks import attend_across
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.saved_names import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.sharding import flash


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq kv_heads head_dim"],
    value: Float[Array, "batch seq kv_heads head_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes causal self-attention.

    It has no bias, dropout or cap: `mtjax.layout.attention_kernel` chooses it only for models without these.
    """
    assert context.is_causal and context.bias is None and options.alibi is None
    assert options.dropout_rate == 0 and options.softcap is None
    if context.positions is not None:
        return attend_across("cudnn", query, key, value, context, options)
    kernel, more = kernel_of(query, context.segment_ids, options)
    return flash.flash_attention(
        query, key, value, (ATTENTION_OUTPUT, ATTENTION_STATISTICS), kernel, more, options.sinks
    )


def kernel_of(
    query: Float[Array, "batch seq heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    options: AttentionOptions,
    attend: Callable[..., Array] = flash.cudnn,
    attend_packed: packed.Attend = packed.cudnn,
) -> tuple[flash.FlashKernel, Any]:
    """Returns the kernel of a layer, and what else it reads.

    Args:
      query: its queries.
      segments: ids of documents, where these are kept apart.
      options: if the layer's number selects the window, the kernel has it, or none, as the selected one says.
      attend: (query, key, value, scale=, window=) -> output, with a static window.
      attend_packed: the same within documents.
    """
    length = query.shape[1]
    scale = options.scale_of(query.shape[-1])

    # The length of a window is a constant of cuDNN's kernel.
    def of(window: int | None) -> flash.FlashKernel:
        """Returns the kernel of a window; a window that is not shorter than the sample is none."""
        window = window if window and window < length else None
        if segments is not None:
            return packed.Packed(scale, window, documents_at_most(length), attend_packed)
        settings = {"scale": options.scale, "window": window}
        settings = {name: value for name, value in settings.items() if value is not None}
        return flash.Differentiable(partial(attend, **settings) if settings else attend)

    if options.window is None or isinstance(options.window, int):
        return of(options.window), segments
    # No window of any layer is shorter than the sample.
    if (least := min(options.windows)) >= length:
        return of(None), segments
    # Layers have one window or none: the kernel of either is compiled, and the layer's number selects it.
    return flash.WindowedOrFull(of(least), of(None)), (options.window < length, segments)
