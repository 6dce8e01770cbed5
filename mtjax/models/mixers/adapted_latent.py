"""Multi-head latent attention with low-rank adapters on its products (LoRA, `mtjax.models.lora`)."""

import jax
from jax import Array

from mtjax.config import Model
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import adapter_of, add_adapter, gather_sequence_shared, lora_input_dropout
from mtjax.models.mixers.adapted import Adapted
from mtjax.models.mixers.latent_attention import LatentAttention, Up
from mtjax.models.ops import Linear

DOWN_SITE, QUERY_SITE, LATENT_SITE, OUTPUT_SITE = 9, 10, 11, 12
"""Dropout sites of the adapters' inputs."""


class AdaptedLatentAttention(Adapted, LatentAttention):
    """Latent attention with adapters on its products, those to the latents among them; for training."""

    target = "attention"
    output_site = OUTPUT_SITE

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        keys = jax.random.split(key, 5)
        if model.q_lora_rank:
            add_adapter(self.query_down, 1, self.low, keys[0])
            add_adapter(self.query_up, 1, self.low, keys[1])
        else:
            add_adapter(self.query, 1, self.low, keys[1])
        add_adapter(self.key_value_down, 1, self.low, keys[2])
        add_adapter(self.key_value_up, 1, self.low, keys[3])
        add_adapter(self.output, 2, self.low, keys[4])

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array]:
        """See `LatentAttention.project_in`."""
        # Adapters with the same input share a dropout mask.
        dropped = lora_input_dropout(x, self.low, context, DOWN_SITE, "embed", sequence="act_seq")

        def down(product: Linear) -> Array:
            return product(x) + adapter_of(product)(dropped)

        if self.model.q_lora_rank:
            query = self._up(self.query_up, self.query_norm(down(self.query_down)), context, QUERY_SITE)
        else:
            query = self._up(self.query, x, context, QUERY_SITE)
        return query, down(self.key_value_down)

    def project_latent(self, latent: Array, context: LayerContext) -> Array:
        """See `LatentAttention.project_latent`."""
        assert isinstance(self.key_value_up, Up)
        return self._up(self.key_value_up, latent, context, LATENT_SITE)

    def _up(self, product: Up, x: Array, context: LayerContext, site: int) -> Array:
        """Computes the heads of all tokens from a latent or from hidden states."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, site)
        return product(for_product) + adapter_of(product)(for_adapter)
