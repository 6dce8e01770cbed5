"""cuDNN's flash attention: causal, in 16 bits, on GPUs; probabilities are not materialized."""

from jax import Array
from jaxtyping import Float

from mtjax.models.kernels.blocks import attend_across
from mtjax.models.layer_context import LayerContext
from mtjax.models.recompute import ATTENTION_OUTPUT, ATTENTION_STATISTICS
from mtjax.sharding.flash import flash_attention


def attend(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    context: LayerContext,
    rate: float,
) -> Float[Array, "batch seq heads head_dim"]:
    """Computes causal self-attention.

    It has no mask, bias, scale or dropout: `mtjax.theory.attention` chooses it only for models without these.
    """
    assert context.is_causal and context.segment_ids is None and rate == 0
    assert context.bias is None and context.scale is None
    if context.positions is not None:
        return attend_across("cudnn", query, key, value, context, rate)
    return flash_attention(query, key, value, (ATTENTION_OUTPUT, ATTENTION_STATISTICS))
