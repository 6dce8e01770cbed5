"""cuDNN's flash attention: causal, in 16 bits, on GPUs; probabilities are not materialized."""

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

    It has no mask, bias, dropout, cap or sinks: `mtjax.theory.attention` chooses it only for models without these.
    """
    assert context.is_causal and context.segment_ids is None and context.bias is None
    assert options.rate == 0 and options.softcap is None and options.sinks is None
    if context.positions is not None:
        return attend_across("cudnn", query, key, value, context, options)
    kernel = flash.cudnn if options.scale is None else partial(flash.cudnn, scale=options.scale)
    return flash.flash_attention(query, key, value, (ATTENTION_OUTPUT, ATTENTION_STATISTICS), kernel)
