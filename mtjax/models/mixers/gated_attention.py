"""Self-attention whose output passes a gate (Qwen3-Next)."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import attention_biases, head_dim
from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import Linear
from mtjax.models.mixers.attention import SelfAttention
from mtjax.models.mixers.mixer import State
from mtjax.models.project import gather_sequence


class GatedSelfAttention(SelfAttention):
    """Self-attention that multiplies each channel of its heads by the sigmoid of a product of the same input."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        heads, bias = {"heads": model.num_heads, "head_dim": head_dim(model)}, attention_biases(model)[0]
        gate_key = jax.random.fold_in(key, 3)
        self.gate = Linear({"embed": model.hidden_size}, heads, std=model.init_std, bias=bias, key=gate_key)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: State
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """See `SelfAttention.__call__`."""
        gathered = gather_sequence(x, None)
        gate = self.gate(gathered)
        mixed, state = self.mix(*self.qkv(gathered), context, state)
        opened = mixed.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
        return self.output(opened.astype(mixed.dtype)), state
