"""Attention and MLP of a shared block (Zamba2) with low-rank adapters on their products (LoRA, `mtjax.models.lora`).

They are the block's, as its matrices are: every layer that runs the block has the same.
"""

from typing import Any

from jax import Array

from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import adapter_of, lora_input_dropout
from mtjax.models.mixers.adapted import QKV_SITE, UP_SITE, AdaptedMLP, AdaptedSelfAttention
from mtjax.models.shared_block import BlockAttention, BlockMLP, with_own_adapter


class AdaptedBlockAttention(AdaptedSelfAttention, BlockAttention):
    """A shared block's attention with adapters."""

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array]:
        """See `ProjectedSelfAttention.project_in`; adds the layer's own adapter, too, whose input has no dropout."""
        for_product, for_adapters, layer_adapter = with_own_adapter(x, context, "attention_adapter")
        dropped = lora_input_dropout(for_adapters, self.low, context, QKV_SITE, "embed")
        if layer_adapter is None:
            return self.add_to_qkv(for_product, dropped)
        qkv: Any = self.qkv  # a `FusedQKV`: there are as many key heads as query heads
        return qkv(for_product, lambda: adapter_of(qkv)(dropped) + layer_adapter(for_adapters))


class AdaptedBlockMLP(AdaptedMLP, BlockMLP):
    """A shared block's MLP with adapters."""

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """See `MLP.project_up`; the layer's own adapter, whose input has no dropout, is added, too."""
        for_product, for_adapters, layer_adapter = with_own_adapter(x, context, "mlp_adapter")
        dropped = lora_input_dropout(for_adapters, self.low, context, UP_SITE, "embed")
        return self.up(for_product) + layer_adapter(for_adapters) + adapter_of(self.up)(dropped)
