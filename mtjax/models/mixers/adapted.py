"""Attention and MLP with low-rank adapters on their products (LoRA, `mtjax.models.lora`)."""

import jax
from jax import Array

from mtjax.config import Model
from mtjax.config.adapters import adapters_of
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import adapter_of, add_adapter, gather_sequence_shared, lora_input_dropout
from mtjax.models.mixers.attention import FusedQKV, SelfAttention
from mtjax.models.mixers.mlp import MLP
from mtjax.sharding.kv_heads import heads_in_use

QKV_SITE, OUTPUT_SITE, UP_SITE, DOWN_SITE = 5, 6, 7, 8
"""Dropout sites of the adapters' inputs."""


class AdaptedSelfAttention(SelfAttention):
    """Self-attention with adapters."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        low = adapters_of(model, "attention")
        assert low is not None
        self.low = low
        qkv_key, output_key = jax.random.split(key)
        if isinstance(self.qkv, FusedQKV):
            add_adapter(self.qkv, 1, low, qkv_key)
        else:
            query_key, kv_key = jax.random.split(qkv_key)
            add_adapter(self.qkv.query, 1, low, query_key)
            add_adapter(self.qkv.key_value, 1, low, kv_key)
        add_adapter(self.output, 2, low, output_key)

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array]:
        """See `SelfAttention.project_in`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, QKV_SITE)
        if isinstance(self.qkv, FusedQKV):
            return self.qkv.split(self.qkv.product(for_product) + adapter_of(self.qkv)(for_adapter))
        query, key, value = self.qkv(for_product)
        # The adapter's B has a column per KV head, like its matrix: ranks select theirs in the same way.
        lora = adapter_of(self.qkv.key_value)
        added = lora(for_adapter, heads_in_use(lora.b[...]), ("heads", "head_dim"))
        return query + adapter_of(self.qkv.query)(for_adapter), key + added[:, :, 0], value + added[:, :, 1]

    def project_out(self, mixed: Array, context: LayerContext) -> Array:
        """See `SelfAttention.project_out`."""
        dropped = lora_input_dropout(mixed, self.low, context, OUTPUT_SITE, "heads", "head_dim")
        return self.output(mixed) + adapter_of(self.output)(dropped)


class AdaptedMLP(MLP):
    """An MLP with adapters."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        low = adapters_of(model, "mlp")
        assert low is not None
        self.low = low
        up_key, down_key = jax.random.split(key)
        add_adapter(self.up, 1, low, up_key)
        add_adapter(self.down, 1, low, down_key)

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """See `MLP.project_up`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, UP_SITE)
        return self.up(for_product) + adapter_of(self.up)(for_adapter)

    def project_down(self, inner: Array, context: LayerContext) -> Array:
        """See `MLP.project_down`."""
        return self.down(inner) + adapter_of(self.down)(lora_input_dropout(inner, self.low, context, DOWN_SITE, "mlp"))
