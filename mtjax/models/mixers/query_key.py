"""What self-attention does with queries and keys before their scores: norms, clipping, rotation, scaling."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import head_dim, num_kv_heads
from mtjax.layout.weights import head_norm_weights
from mtjax.models.head_norm import HeadNorm
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.transformer import SelfAttention
from mtjax.models.rotary import rotate


def prepared(
    mixer: SelfAttention, query: Array, key: Array, value: Array, context: LayerContext
) -> tuple[Array, Array, Array]:
    """Normalizes, clips, rotates and scales query, key and value, [batch, seq, heads, head_dim] each."""
    norms = (mixer.query_norm, mixer.key_norm)
    if not mixer.norms_after_rope:
        query, key = _normalized(query, key, *norms)
    if mixer.clip is not None:
        query, key, value = (jnp.clip(a, -mixer.clip, mixer.clip) for a in (query, key, value))
    if context.rotation is not None:
        # Cached keys are stored rotated, by their positions.
        query, key = (rotate(a, context.rotation, context.layer) for a in (query, key))
    if mixer.norms_after_rope:
        query, key = _normalized(query, key, *norms)
    # The factor belongs to the query's position: cached keys stay as they are.
    return scaled_by_position(query, context), key, value


def scaled_by_position(query: Float[Array, "batch seq heads head_dim"], context: LayerContext) -> Array:
    """Multiplies queries by the factors of their positions, where there are any."""
    if context.query_scale is None:
        return query
    return (query * context.query_scale[:, :, None, None]).astype(query.dtype)


def head_norms(model: Model) -> tuple[HeadNorm, HeadNorm]:
    """Builds the norms of queries and of keys (QK norm)."""
    heads, is_shared = (model.num_heads, num_kv_heads(model), head_dim(model)), model.qk_norm_scope == "head"
    sizes = head_norm_weights(*heads, is_shared=is_shared, bias=model.qk_norm_bias)
    return HeadNorm(model, sizes["query_norm"]), HeadNorm(model, sizes["key_norm"])


def _normalized(query: Array, key: Array, query_norm: HeadNorm | None, key_norm: HeadNorm | None) -> tuple[Array, ...]:
    return query if query_norm is None else query_norm(query), key if key_norm is None else key_norm(key)
