"""Cross-attention, from a decoder's tokens to an encoder's."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import attention_biases, head_dim
from mtjax.layout.weights import cross_products
from mtjax.models.kernels.cached import attend_grouped
from mtjax.models.kernels.xla import softmax_attention
from mtjax.models.kv_cache import CrossKVCache
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.transformer import attention_options
from mtjax.models.ops import Linear
from mtjax.models.project import reshard_sequence
from mtjax.models.relative import initial_query_scale

PROBABILITIES_SITE = 3


class CrossAttention(nnx.Module):
    """Attention from the decoder's tokens to the encoder's, sharded by heads."""

    scope: ClassVar[str] = "attention"
    init_number: ClassVar[int] = 2
    dropout_site: ClassVar[int] = 4

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        query_key, kv_key, output_key = jax.random.split(key, 3)
        sizes = cross_products(model.hidden_size, model.num_heads, head_dim(model))
        query_std = model.init_std * initial_query_scale(model)
        bias, output_bias = attention_biases(model)
        self.query = Linear(*sizes["query"], std=query_std, bias=bias, key=query_key)
        self.key_value = Linear(*sizes["key_value"], std=model.init_std, bias=bias, key=kv_key)
        self.output = Linear(*sizes["output"], std=output_std, bias=output_bias, sequence="act_seq", key=output_key)
        self.options = attention_options(model)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Attends from each token to the encoder's tokens that are not padding, or to their cached keys and values.

        Args:
          x: the decoder's hidden states.
          context: with the encoder's hidden states and mask, or cache positions.
          state: None, or a `CrossKVCache`.

        Returns:
          The output, and `state`.
        """
        # Column-parallel: heads are sharded, sequences are gathered.
        query = self.query(reshard_sequence(x, "seq"))
        if state is None:
            mixed = self._to_encoded(query, context)
        else:
            assert isinstance(state, CrossKVCache) and context.cache_positions is not None
            # The encoder ran once, in prefill; only its keys and values are needed.
            keys, values, lengths = state.read_by(context.cache_positions)
            # Later positions hold what an earlier text of this slot has left.
            is_visible = (jnp.arange(state.length) < lengths[:, None])[:, None]
            mixed = attend_grouped(query, keys, values, is_visible, self.options)
        return self.output(mixed), state

    def keys_and_values(self, encoded: Float[Array, "batch act_seq embed"]) -> tuple[Array, Array]:
        """Computes keys and values of the encoder's hidden states, each [batch, seq, heads, head_dim]."""
        key_value = self.key_value(reshard_sequence(encoded, "seq"))
        key, value = (a.squeeze(2) for a in jnp.split(key_value, 2, axis=2))
        return key, value

    def _to_encoded(self, query: Array, context: LayerContext) -> Array:
        """Attends from query [batch, seq, heads, head_dim] to the encoder's hidden states."""
        assert context.encoded is not None
        key, value = self.keys_and_values(context.encoded)
        mask = jnp.ones((1, 1, 1, key.shape[1]), bool)
        if context.encoded_mask is not None:
            mask = context.encoded_mask[:, None, None, :] > 0
        return softmax_attention(query, key, value, mask, self.options, context.dropout_keys, site=PROBABILITIES_SITE)
