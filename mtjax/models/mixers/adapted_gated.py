"""Self-attention whose output passes a gate, with low-rank adapters on its products (LoRA, `mtjax.models.lora`)."""

import jax
from jax import Array

from mtjax.config import Model
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.lora import adapter_of, add_adapter, gather_sequence_shared
from mtjax.models.mixers.adapted import QKV_SITE, AdaptedSelfAttention
from mtjax.models.mixers.gated_attention import GatedSelfAttention


class AdaptedGatedAttention(AdaptedSelfAttention, GatedSelfAttention):
    """Self-attention with a gate and adapters; that of the gate has the input of the others."""

    def __call__(self, x: Array, context: LayerContext, state: MixerState) -> tuple[Array, MixerState]:
        """See `GatedSelfAttention.__call__`."""
        return GatedSelfAttention.__call__(self, x, context, state)

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        super().add_adapters(model, key)
        add_adapter(self.gate, 1, self.low, jax.random.fold_in(key, 3))

    def project_with_gate(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array, Array]:
        """See `GatedSelfAttention.project_with_gate`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, QKV_SITE)
        gate = self.gate(for_product) + adapter_of(self.gate)(for_adapter)
        return gate, *self.add_to_qkv(for_product, for_adapter)
