"""The mixers of a transformer: multi-head self-attention and the MLP, both column-parallel, then row-parallel.

Attention is sharded by heads: no communication between its two projections (Figure 3b of arXiv 1909.08053).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import GATED, attention_biases, attention_windows, head_dim, mlp_bias, mlp_size, num_kv_heads
from mtjax.layout.weights import ProductSizes, attention_products, attention_sinks, mlp_products
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.ops import Linear, activation_of, constant, draw_normal, scaled
from mtjax.models.project import ProductRule, gather_sequence, project
from mtjax.models.saved_names import SAVED, is_unrolled

Attend = Callable[[Array, Array, Array, LayerContext, AttentionOptions], Array]
"""(query, key, value, context, options) -> output."""


def kernel_of(attention: str) -> Attend:
    """Returns the kernel that the setting `attention` names; auto was replaced (`mtjax.layout.attention_kernel`)."""
    match attention:
        case "cudnn":
            from mtjax.models.kernels.cudnn import attend
        case "pallas":
            from mtjax.models.kernels.pallas import attend
        case "blocks":
            from mtjax.models.kernels.in_blocks import attend
        case _:
            from mtjax.models.kernels.xla import attend
    return attend


def self_attention_products(model: Model) -> Mapping[str, ProductSizes]:
    """Returns the dimensions of attention's products, by name."""
    heads, is_gated = (model.num_heads, num_kv_heads(model), head_dim(model)), model.attention_output_gate
    return attention_products(model.hidden_size, *heads, is_gated=is_gated)


class SelfAttention(nnx.Module):
    """Self-attention with one product for query, key and value."""

    scope: ClassVar[str] = "attention"
    init_number: ClassVar[int] = 0
    dropout_site: ClassVar[int] = 1
    largest_scores: nnx.Param | None = None
    """See `AttentionOptions`."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        qkv_key, output_key = jax.random.split(key)
        # Column-parallel query, key and value (sharded over heads), row-parallel output.
        if num_kv_heads(model) == model.num_heads:
            self.qkv = FusedQKV(model, key=qkv_key)
        else:
            from mtjax.models.mixers.grouped_qkv import GroupedQKV

            self.qkv = GroupedQKV(model, key=qkv_key)
        sizes, bias = self_attention_products(model)["output"], attention_biases(model)[1]
        self.output = Linear(*sizes, std=output_std, bias=bias, sequence="act_seq", key=output_key)
        if model.qk_norm:
            from mtjax.models.mixers.query_key import head_norms

            self.query_norm, self.key_norm = head_norms(model)
        else:
            self.query_norm = self.key_norm = None
        self.norms_after_rope = model.qk_norm_after_rope
        self.clip = model.qkv_clip
        self.sinks = constant(0.0, attention_sinks(model.num_heads)) if model.attention_sinks else None
        if model.position == "relative" and model.relative_bias_layers == "all":
            from mtjax.models.relative import RelativeBias

            self.relative = RelativeBias(model, key=jax.random.fold_in(key, 2))
        else:
            self.relative = None
        self.options = attention_options(model)
        self.windows = attention_windows(model)
        self.attend = kernel_of(model.attention)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Attends from each token to the tokens of the context's mask, or to the cached tokens up to it.

        `state` is None, or a `KVCache` or `WindowKVCache`, to which the tokens are appended. Returns the output and the
        new state.
        """
        query, key, value = self.qkv(gather_sequence(x, self.qkv.rule))
        mixed, state = self.mix(query, key, value, context, state)
        return self.project_out(mixed, context), state

    def mix(
        self, query: Array, key: Array, value: Array, context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch seq heads head_dim"], MixerState]:
        """Attends with query, key and value as the product returns them, [batch, seq, heads or kv_heads, head_dim]:
        normalizes, clips and rotates them first, where the model does. Otherwise as `__call__`."""
        # With sequence parallelism the product's input was all-gathered along the sequence; from here to the output
        # projection each rank has its heads of all tokens.
        if not self.qkv.has_plain_queries_and_keys or context.rotation is not None or context.query_scale is not None:
            from mtjax.models.mixers.query_key import prepared

            query, key, value = prepared(self, query, key, value, context)
        if is_unrolled() and self.qkv.has_plain_queries_and_keys:
            # What the backward pass reads, instead of the products from which it would rotate these again.
            query, key, value = (checkpoint_name(a, SAVED) for a in (query, key, value))
        options = options_in_layer(self, context)
        options = options if self.sinks is None else dataclasses.replace(options, sinks=self.sinks[...])
        # Training and evaluation have no state; generation has a KV cache.
        if state is None:
            if self.relative is not None:
                bias = self.relative(query.shape[1], is_causal=context.is_causal)
                context = dataclasses.replace(context, bias=bias)
            return self.attend(query, key, value, context, options), None
        from mtjax.models.kernels.cached import append_and_attend

        return append_and_attend(query, key, value, context, state, options, self.relative)

    def project_out(self, mixed: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, heads, head_dim] to [batch, act_seq, embed]; adapters (subclasses) read `context`."""
        return self.output(mixed)


def options_in_layer(mixer: Any, context: LayerContext) -> AttentionOptions:
    """Returns a layer's options of attention: its window, and zeros whose gradient is its largest scores, if any."""
    options, zeros = mixer.options, mixer.largest_scores
    if mixer.windows is not None:
        from mtjax.models.of_layer import of_layer

        window = of_layer(mixer.windows, context.layer)
        options = dataclasses.replace(options, window=window, windows=mixer.windows)
    return options if zeros is None else dataclasses.replace(options, largest_scores=zeros[...])


class FusedQKV(nnx.Module):
    """One product for query, key and value, with the same number of heads each."""

    rule: ProductRule | None = None
    """Of the product; see `project`."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the weight, [embed, 3, heads, head_dim]."""
        # Sharded by heads, the third dimension: a rank's shard has the query, key and value of its heads.
        sizes = self_attention_products(model)["qkv"]
        self.weight = draw_normal(key, sizes.weight, model.init_std)
        if model.position == "relative":
            from mtjax.models.relative import initial_query_scale

            # Only the query's third of [embed, 3, heads, head_dim].
            self.weight[...] *= jnp.array([initial_query_scale(model), 1.0, 1.0])[None, :, None, None]
        self.bias = constant(0.0, sizes.outputs) if attention_biases(model)[0] else None
        self.has_plain_queries_and_keys = has_plain_queries_and_keys(model)

    def __call__(
        self, x: Float[Array, "batch seq embed"], adapter: Callable[[], Array] | None = None
    ) -> tuple[Array, Array, Array]:
        """Computes query, key and value, each [batch, seq, heads, head_dim]; `adapter` computes what is added to the
        product, [batch, seq, 3, heads, head_dim], if anything is."""
        bias = None if self.bias is None else self.bias[...]
        # Else what is made of it is saved (`SelfAttention.mix`).
        save, names = not (is_unrolled() and self.has_plain_queries_and_keys), ("qkv", "heads", "head_dim")
        product = project(x, self.weight[...], bias, names, save_for_backward=save, by_sample=True, rule=self.rule)
        product = product if adapter is None else product + adapter()
        query, key, value = (a.squeeze(2) for a in jnp.split(product, 3, axis=2))
        return query, key, value


def has_plain_queries_and_keys(model: Model) -> bool:
    """Returns whether queries and keys are neither normalized nor clipped; they may be rotated or scaled."""
    return not model.qk_norm and model.qkv_clip is None


def attention_options(model: Model) -> AttentionOptions:
    """Returns the options of a model's attention."""
    scale = model.attention_scale
    if scale is None and model.position == "relative":
        scale = 1.0  # T5 does not scale attention scores; its query weights are initialized smaller instead.
    options = AttentionOptions(model.attention_dropout, scale, model.attention_softcap)
    if model.position != "alibi":
        return options
    from mtjax.models.alibi import Alibi

    return dataclasses.replace(options, alibi=Alibi.of(model))


class MLP(nnx.Module):
    """Column-parallel, activation, row-parallel: one all-reduce forward, one backward."""

    scope: ClassVar[str] = "mlp"
    init_number: ClassVar[int] = 1
    dropout_site: ClassVar[int] = 2

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        up_key, down_key = jax.random.split(key)
        sizes = mlp_products(model.hidden_size, mlp_size(model), is_gated=model.activation in GATED)
        bias = mlp_bias(model)
        self.up = Linear(*sizes["up"], std=model.init_std, bias=bias, key=up_key)
        self.down = Linear(*sizes["down"], std=output_std, bias=bias, sequence="act_seq", key=down_key)
        self.activation, self.gate_scale = activation_of(model.activation), model.mlp_gate_scale

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        context: LayerContext,
        state: MixerState,
        factor: Float[Array, "batch seq 1"] | None = None,
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Applies to each token, and multiplies the output by `factor`, if any; there is no state."""
        inner = self.project_up(x, context)
        if self.gate_scale != 1:
            inner = scaled(inner, np.array([[self.gate_scale], [1.0]], np.float32))
        inner = self.activation(inner)
        if factor is not None:
            # Before the row-parallel product, whose output is then reduced together with what is added to it; in
            # float32, so that the factor's gradient is reduced in float32.
            inner = (inner.astype(jnp.float32) * factor).astype(inner.dtype)
        return self.project_down(inner, context), state

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """All-gathers sequences, and projects to [batch, seq, mlp], or [batch, seq, 2, mlp] with a gate."""
        return self.up(gather_sequence(x, self.up.rule))

    def project_down(self, inner: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, mlp] to the residual stream, [batch, act_seq, embed]."""
        return self.down(inner)
