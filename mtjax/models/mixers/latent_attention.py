"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1), sharded by heads.

Keys and values of all heads are computed from one latent per token, queries from another one or from the hidden states.
A part of each query and key is rotated (RoPE); the rotated part of the key is the same for all heads.

Parameters, with the columns of matrices in this order:

- `query_down.weight` [embed, latent], `query_norm.scale` [latent], `query_up.weight` [latent, heads, head_dim]; where
  q_lora_rank is 0, `query.weight` [embed, heads, head_dim] instead. Of head_dim the first qk_nope_head_dim are not
  rotated, the other qk_rope_head_dim are.
- `key_value_down.weight` [embed, latent]: kv_lora_rank columns of the latent, then qk_rope_head_dim of the rotated key.
- `key_value_norm.scale` [latent]: of the kv_lora_rank columns.
- `key_value_up.weight` [latent, heads, head_dim]: of each head the qk_nope_head_dim of the key, then v_head_dim of the
  value.
- `output.weight` [heads, head_dim, embed], with v_head_dim.

RoPE rotates pairs (i, i + qk_rope_head_dim / 2). DeepSeek's files pair neighbors: the columns of the rotated parts are
permuted when they are read.
"""

from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import reshard
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import attention_windows, head_dim
from mtjax.layout.weights import ProductSizes, Sizes, latent_products
from mtjax.models.kernels.cached import attend_latent
from mtjax.models.kernels.xla import HEADS
from mtjax.models.kv_cache import LatentCache
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.query_key import scaled_by_position
from mtjax.models.mixers.transformer import attention_options, kernel_of, options_in_layer
from mtjax.models.ops import Linear, constant, draw_normal
from mtjax.models.project import ProductRule, project, reshard_sequence, seq_major
from mtjax.models.rotary import rotate
from mtjax.sharding.axes import sequence_is_sharded, spec

EPSILON = 1e-6
"""Of the latents' norms, whatever norm_epsilon is, as in DeepSeek's and transformers' code."""


class LatentNorm(nnx.Module):
    """RMSNorm of a latent; the result has the type of the input."""

    def __init__(self, sizes: Sizes) -> None:
        """Builds scale 1."""
        self.scale = constant(1.0, sizes)

    def __call__(self, x: Float[Array, "batch act_seq latent"]) -> Float[Array, "batch act_seq latent"]:
        """Applies to the last dimension."""
        wide = x.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON)
        return (normal * self.scale[...]).astype(x.dtype)


class Up(nnx.Module):
    """The product of a latent, or of hidden states, with a matrix of columns per head."""

    rule: ProductRule | None = None
    """Of the product; see `project`."""

    def __init__(self, sizes: ProductSizes, std: float, key: Array) -> None:
        """Draws the weight, [*inputs, heads, head_dim]."""
        self.weight = draw_normal(key, sizes.weight, std)

    def __call__(self, x: Float[Array, "batch act_seq width"]) -> Float[Array, "batch seq heads head_dim"]:
        """Computes the heads of all tokens of a sequence."""
        # Column-parallel. With sequence parallelism the latent is all-gathered, not the wider hidden states.
        x, outputs = reshard_sequence(x, "seq"), ("heads", "head_dim")
        return project(x, self.weight[...], None, outputs, by_sample=True, rule=self.rule)


class LatentAttention(nnx.Module):
    """Self-attention whose keys and values are computed from a latent."""

    scope: ClassVar[str] = "attention"
    init_number: ClassVar[int] = 0
    dropout_site: ClassVar[int] = 1
    largest_scores: nnx.Param | None = None
    """See `AttentionOptions`."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        keys, std = jax.random.split(key, 5), model.init_std
        sizes = latent_products(
            model.hidden_size,
            model.num_heads,
            latent=model.kv_lora_rank,
            query_latent=model.q_lora_rank,
            still=model.qk_nope_head_dim,
            rotated=model.qk_rope_head_dim,
            value=model.v_head_dim,
        )
        # Matrices to the latents are replicated over tensor parallel ranks, as all heads read the entire latent.
        low = {"std": std, "bias": False, "sequence": "act_seq"}
        if model.q_lora_rank:
            self.query_down = Linear(*sizes["query_down"], **low, key=keys[0])
            self.query_norm = LatentNorm(sizes["query_up"].inputs)
            self.query_up = Up(sizes["query_up"], std, keys[1])
        else:
            self.query = Up(sizes["query"], std, keys[1])
        self.key_value_down = Linear(*sizes["key_value_down"], **low, key=keys[2])
        self.key_value_norm = LatentNorm(sizes["key_value_up"].inputs)
        self.key_value_up: Up | AbsorbedUp = Up(sizes["key_value_up"], std, keys[3])
        self.output = Linear(*sizes["output"], std=output_std, bias=False, sequence="act_seq", key=keys[4])
        self.model = model
        # The default scale is that of queries in training, not of the wider queries of cached latents.
        options = attention_options(model)
        self.options = replace(options, scale=options.scale_of(head_dim(model)))
        self.windows = attention_windows(model)
        self.attend = kernel_of(model.attention)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Attends from each token to the tokens of the context's mask, or to the cached tokens up to it.

        Args:
          x: the input.
          context: mask, rotation, dropout keys, cache positions.
          state: None, or a `LatentCache`, to which the tokens are appended.

        Returns:
          The output, and the new state.
        """
        model, still = self.model, self.model.qk_nope_head_dim
        query, down = self.project_in(x, context)
        query = jnp.concatenate(
            [query[..., :still], rotate(query[..., still:], context.rotation, context.layer)], axis=-1
        )
        query = scaled_by_position(query, context)
        # The rotated key is not normalized: it shares only the product with the latent.
        latent = self.key_value_norm(down[..., : model.kv_lora_rank])
        turned = down[..., model.kv_lora_rank :]
        if state is not None:
            mixed, state = self._attend_cached(query, latent, turned, context, state)
            return self.project_out(mixed, context), state
        key_value = self.project_latent(latent, context)
        # Repeated before it is rotated: a head's gradient is rotated, and the sum over heads is then sent as it is.
        turned = rotate(_for_each_head(turned, model.num_heads), context.rotation, context.layer)
        key = jnp.concatenate([key_value[..., :still], turned], axis=-1)
        options = options_in_layer(self, context)
        return self.project_out(self.attend(query, key, key_value[..., still:], context, options), context), None

    def project_in(self, x: Float[Array, "batch act_seq embed"], context: LayerContext) -> tuple[Array, Array]:
        """Computes queries, [batch, seq, heads, head_dim], and the latents of keys and values with the rotated key,
        [batch, act_seq, latent]; neither is normalized or rotated."""
        del context
        query = self.query_up(self.query_norm(self.query_down(x))) if self.model.q_lora_rank else self.query(x)
        return query, self.key_value_down(x)

    def project_latent(self, latent: Float[Array, "batch act_seq latent"], context: LayerContext) -> Array:
        """Computes the parts of keys that are not rotated, and values: [batch, seq, heads, head_dim]."""
        del context
        assert isinstance(self.key_value_up, Up)
        return self.key_value_up(latent)

    def project_out(self, mixed: Float[Array, "batch seq heads head_dim"], context: LayerContext) -> Array:
        """Computes the output, [batch, act_seq, embed]."""
        del context
        return self.output(mixed)

    def absorbed(self) -> "AbsorbedUp":
        """Splits `key_value_up` into the matrices of keys and of values, for generation."""
        assert isinstance(self.key_value_up, Up)
        return AbsorbedUp(self.key_value_up.weight[...], self.model.qk_nope_head_dim)

    def _attend_cached(
        self, query: Array, latent: Array, turned: Array, context: LayerContext, state: MixerState
    ) -> tuple[Array, LatentCache]:
        """Attends to the cached latents, to which those of the new tokens are appended: `latent`, [batch, seq, latent],
        and `turned`, the part of their keys to rotate, [batch, seq, rope]."""
        assert isinstance(state, LatentCache) and context.cache_positions is not None
        assert isinstance(self.key_value_up, AbsorbedUp)
        turned = rotate(turned[:, :, None], context.rotation, context.layer)[:, :, 0]
        # Normalized and rotated, so that what is cached needs no further computation.
        state = state.append(jnp.concatenate([latent, turned], -1), context.cache_positions)
        # Queries go to the width of the latents: scores are products with the cache itself, of all heads.
        query = self.key_value_up.query(query, self.model.qk_nope_head_dim)
        options = options_in_layer(self, context)
        mixed = attend_latent(query, state, self.model.kv_lora_rank, context.cache_positions, options, context.bias)
        return self.key_value_up.value(mixed), state


class AbsorbedUp(nnx.Module):
    """`key_value_up` for generation: queries are multiplied by the matrix of keys, and attention's outputs by that of
    values, so that no keys and values are computed from the cached latents (section 2.1.2); not for training."""

    def __init__(self, weight: Float[Array, "latent heads head_dim"], still: int) -> None:
        # The latent has no name here, so that these are not converted like matrices of ordinary products.
        names = (None, "heads", "head_dim")
        self.keys, self.values = (nnx.Param(part, axes=names) for part in (weight[..., :still], weight[..., still:]))

    def query(self, query: Array, still: int) -> Float[Array, "batch seq heads latent"]:
        """Computes queries of cached latents and rotated keys."""
        keys = self.keys[...].astype(query.dtype)
        latent = jnp.einsum("bshd,chd->bshc", query[..., :still], keys, out_sharding=spec(*HEADS))
        return jnp.concatenate([latent, query[..., still:]], -1)

    def value(self, mixed: Float[Array, "batch seq heads latent"]) -> Float[Array, "batch seq heads head_dim"]:
        """Computes values from mixtures of latents."""
        values = self.values[...].astype(mixed.dtype)
        return jnp.einsum("bshc,chd->bshd", mixed, values, out_sharding=spec(*HEADS))


def _for_each_head(key: Float[Array, "batch act_seq width"], heads: int) -> Float[Array, "batch seq heads width"]:
    """Repeats a key for each head, so that the kernels of ordinary attention serve; its gradient is summed over
    heads."""
    # With sequence parallelism seq-major, as in `mtjax.models.project`.
    names = ("seq", "batch") if sequence_is_sharded() else ("batch", "seq")
    key = seq_major(key) if sequence_is_sharded() else key
    key = reshard(key, spec(*names, None))[:, :, None]
    shape = (*key.shape[:2], heads, key.shape[-1])
    repeated = jnp.broadcast_to(key, shape, out_sharding=spec(*names, "heads", "head_dim"))
    return seq_major(repeated) if sequence_is_sharded() else repeated
