"""Attention and MLP with low-rank adapters on their products (LoRA, `mtjax.models.lora`), and their base class."""

from typing import Any, ClassVar, Literal

import jax
from flax import nnx
from jax import Array

from mtjax.config import Model
from mtjax.config.adapters import adapters_of
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import adapter_of, add_adapter, gather_sequence_shared, lora_input_dropout
from mtjax.models.mixers.projected import ProjectedSelfAttention
from mtjax.models.mixers.transformer import MLP, FusedQKV
from mtjax.sharding.kv_heads import heads_in_use

QKV_SITE, OUTPUT_SITE, UP_SITE, DOWN_SITE = 5, 6, 7, 8
"""Dropout sites of the adapters' inputs."""


class Adapted(nnx.Module):
    """A mixer with adapters: the first base of such a class, before the mixer."""

    target: ClassVar[Literal["attention", "mlp", "mamba", "delta"]]
    """In `lora_targets`."""
    output_site: ClassVar[int]
    """Dropout site of the input of the output product's adapter."""
    output: Any

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters of the mixer, then those of the adapters, from the same key."""
        # The mixer draws what it would draw without adapters.
        super().__init__(model, output_std=output_std, key=key)  # pyright: ignore[reportCallIssue]
        low = adapters_of(model, self.target)
        assert low is not None, "mixers.registry has asked"
        self.low = low
        self.add_adapters(model, key)

    def add_adapters(self, model: Model, key: Array) -> None:
        """Adds the adapters to the products."""
        raise NotImplementedError

    def project_out(self, mixed: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, heads, head_dim] to the residual stream, [batch, act_seq, embed]."""
        dropped = lora_input_dropout(mixed, self.low, context, self.output_site, "heads", "head_dim")
        return self.output(mixed) + adapter_of(self.output)(dropped)


class AdaptedSelfAttention(Adapted, ProjectedSelfAttention):
    """Self-attention with adapters."""

    target = "attention"
    output_site = OUTPUT_SITE

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        del model
        # Adapters of query and of key and value are two where their matrices are two parameters.
        qkv_key, output_key = jax.random.split(key)
        if isinstance(self.qkv, FusedQKV):
            add_adapter(self.qkv, 1, self.low, qkv_key)
        else:
            query_key, kv_key = jax.random.split(qkv_key)
            add_adapter(self.qkv.query, 1, self.low, query_key)
            add_adapter(self.qkv.key_value, 1, self.low, kv_key)
        add_adapter(self.output, 2, self.low, output_key)

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array]:
        """See `ProjectedSelfAttention.project_in`."""
        return self.add_to_qkv(*gather_sequence_shared(x, self.low, context, QKV_SITE))

    def add_to_qkv(self, for_product: Array, for_adapter: Array) -> tuple[Array, Array, Array]:
        """Returns query, key and value, each [batch, seq, heads, head_dim]: products and adapters of these inputs."""
        if isinstance(self.qkv, FusedQKV):
            return self.qkv(for_product, lambda: adapter_of(self.qkv)(for_adapter))
        query, key, value = self.qkv(for_product)
        # The adapter's B has a column per KV head, like its matrix: ranks select theirs in the same way.
        lora = adapter_of(self.qkv.key_value)
        added = lora(for_adapter, heads_in_use(lora.b[...]), ("heads", "head_dim"))
        return query + adapter_of(self.qkv.query)(for_adapter), key + added[:, :, 0], value + added[:, :, 1]


class AdaptedMLP(Adapted, MLP):
    """An MLP with adapters."""

    target = "mlp"

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        del model
        for product, each in zip((self.up, self.down), jax.random.split(key), strict=True):
            add_adapter(product, 1, self.low, each)

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """See `MLP.project_up`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, UP_SITE)
        return self.up(for_product) + adapter_of(self.up)(for_adapter)

    def project_down(self, inner: Array, context: LayerContext) -> Array:
        """See `MLP.project_down`."""
        return self.down(inner) + adapter_of(self.down)(lora_input_dropout(inner, self.low, context, DOWN_SITE, "mlp"))
