"""Self-attention whose output passes a gate (Qwen3-Next)."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import attention_biases
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.transformer import SelfAttention, self_attention_products
from mtjax.models.ops import Linear
from mtjax.models.project import gather_sequence


class GatedSelfAttention(SelfAttention):
    """Self-attention that multiplies each channel of its heads by the sigmoid of a product of the same input."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        sizes, bias = self_attention_products(model)["gate"], attention_biases(model)[0]
        # Folded, not split: the other products draw what they would draw without a gate.
        self.gate = Linear(*sizes, std=model.init_std, bias=bias, key=jax.random.fold_in(key, 3))

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """See `SelfAttention.__call__`."""
        gate, query, key, value = self.project_with_gate(x, context)
        mixed, state = self.mix(query, key, value, context, state)
        # The product is in float32, and cast once.
        opened = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return self.project_out(opened.astype(mixed.dtype), context), state

    def project_with_gate(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array, Array]:
        """Returns the gate, before the sigmoid, and query, key and value, each [batch, seq, heads, head_dim]."""
        del context
        # Gathered once for both products.
        gathered = gather_sequence(x, None)
        return self.gate(gathered), *self.qkv(gathered)
