"""Norms of queries and of keys (QK norm)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.config import Model
from mtjax.layout.weights import Sizes
from mtjax.models.ops import constant
from mtjax.models.saved_names import ATTENTION_STATISTICS
from mtjax.sharding.kv_heads import heads_in_use


class HeadNorm(nnx.Module):
    """Norm of each head or of all heads together, by `qk_norm_scope`; the result has the type of the input."""

    def __init__(self, model: Model, sizes: Mapping[str, Sizes]) -> None:
        """Builds the scale and perhaps the bias, with sizes of `head_norm_weights`."""
        self.is_full_width = model.qk_norm_scope == "width"
        self.subtracts_mean = model.qk_norm_kind == "layernorm"
        self.epsilon = model.norm_epsilon
        self.has_kv_heads = "kv_heads" in sizes["scale"]
        self.is_offset = model.norm_weight == "offset"
        self.scale = constant(0.0 if self.is_offset else 1.0, sizes["scale"])
        self.bias = constant(0.0, sizes["bias"]) if "bias" in sizes else None

    def __call__(self, heads: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Applies to the last dimension, or to the last two."""
        x = heads.astype(jnp.float32)
        if self.subtracts_mean:
            x = x - x.mean(-1, keepdims=True)
        if self.is_full_width:
            # Where ranks share key heads, each head has as many copies, so that the mean is that of the heads.
            # Saved, so that the backward pass repeats no reduction over the ranks.
            square = checkpoint_name(jnp.square(x).mean((-2, -1), keepdims=True), ATTENTION_STATISTICS)
        else:
            square = jnp.square(x).mean(-1, keepdims=True)
        normal = x * jax.lax.rsqrt(square + self.epsilon)
        scale = self._of_heads(self.scale)
        normal = normal * (1 + scale if self.is_offset else scale)
        return (normal if self.bias is None else normal + self._of_heads(self.bias)).astype(heads.dtype)

    def _of_heads(self, vector: nnx.Param) -> Array:
        """Returns a parameter for the heads that a rank has."""
        value = vector[...]
        return heads_in_use(value) if self.has_kv_heads else value
