"""cuDNN's flash attention: causal, in 16 bits, on GPUs; probabilities are not materialized."""

from collections.abc import Callable
from functools import partial

from jax import Array
from jaxtyping import Float

from mtjax.models.kernels.blocks import attend_across
from mtjax.models.kernels.options import AttentionOptions
from mtjax.models.layer_context import LayerContext
from mtjax.models.recompute import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.sharding import flash


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    context: LayerContext,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes causal self-attention.

    It has no documents, bias, dropout or cap: `mtjax.theory.attention` chooses it only for models without these.
    """
    assert context.is_causal and context.segment_ids is None and context.bias is None and options.alibi is None
    assert options.rate == 0 and options.softcap is None
    if context.positions is not None:
        return attend_across("cudnn", query, key, value, context, options)
    kernel, more = with_window(flash.cudnn, query.shape[1], options)
    return flash.flash_attention(
        query, key, value, (ATTENTION_OUTPUT, ATTENTION_STATISTICS), kernel, more, options.sinks
    )


def with_window(
    attend: Callable[..., Array], length: int, options: AttentionOptions
) -> tuple[flash.FlashKernel, Array | None]:
    """Returns the kernel of a layer, and what else it reads.

    Args:
      attend: (query, key, value, scale=, window=) -> output, with a static window.
      length: tokens of a sample.
      options: if the layer's number selects the window, the kernel has it, or none, as the selected one says.
    """

    # The length of a window is a constant of cuDNN's kernel.
    def of(window: int | None) -> flash.Differentiable:
        settings = {"scale": options.scale, "window": window if window and window < length else None}
        settings = {name: value for name, value in settings.items() if value is not None}
        return flash.Differentiable(partial(attend, **settings) if settings else attend)

    if options.window is None or isinstance(options.window, int):
        return of(options.window), None
    if (least := min(options.windows)) >= length:
        return of(None), None
    return flash.Either(of(least), of(None)), options.window < length
