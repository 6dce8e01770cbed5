"""Multi-head self-attention, split by heads: no communication between its two projections (Figure 3b of the paper)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Bool, Float, Int, Key

from mtjax.config import Model
from mtjax.config.sizes import head_dim, num_kv_heads
from mtjax.models.layers import Linear, constant, dropout, normal, project
from mtjax.models.recompute import ATTENTION_CORE, ATTENTION_OUTPUT
from mtjax.models.rotary import Rotation, rotate
from mtjax.sharding.axes import spec
from mtjax.sharding.flash import flash_attention
from mtjax.sharding.kv_heads import heads_in_use

HEADS = ("batch", "seq", "heads", "head_dim")
SCORES = ("batch", "heads", "seq", "seq")


@dataclass(frozen=True)
class Context:
    """What every layer reads beside the residual stream."""

    segment_ids: Int[Array, "batch seq"] | None = None
    """When given, tokens attend within their own segment only; padding is a segment of its own."""
    rotation: Rotation | None = None
    """When given, queries and keys are turned by it."""
    is_causal: bool = True
    """Tokens attend to those before them only."""
    bias: Float[Array, "1 heads seq seq"] | None = None
    """When given, added to the scores of self-attention."""
    scale: float | None = None
    """Of the scores; head_dim^-0.5 when None."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """What cross-attention reads."""
    encoded_mask: Int[Array, "batch seq"] | None = None
    """1 on what cross-attention sees, 0 on padding; it sees all when None."""


class FusedQKV(nnx.Module):
    """One product for query, key and value, as many heads of each."""

    def __init__(self, model: Model, *, key: Array) -> None:
        outputs = {"qkv": 3, "heads": model.num_heads, "head_dim": head_dim(model)}
        self.weight = normal(key, {"embed": model.hidden_size, **outputs}, model.init_std)
        self.bias = constant(0.0, outputs) if model.bias else None

    def __call__(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """Query, key and value, each [batch, seq, heads, head_dim]."""
        bias = None if self.bias is None else self.bias[...]
        found = project(x, self.weight[...], bias, ("qkv", "heads", "head_dim"))
        query, key, value = (a.squeeze(2) for a in jnp.split(found, 3, axis=2))
        return query, key, value


class GroupedQKV(nnx.Module):
    """Groups of query heads that share a key and a value head (arXiv 2305.13245), in one product.

    The product's weight is put together by groups, each with its queries, its key and its value, so that a rank
    computes whole groups and the backward pass sums one cotangent of `x`.
    """

    def __init__(self, model: Model, *, key: Array) -> None:
        query_key, kv_key = jax.random.split(key)
        embed, width = {"embed": model.hidden_size}, {"head_dim": head_dim(model)}
        std, bias = model.init_std, model.bias
        self.query = Linear(embed, {"heads": model.num_heads, **width}, std=std, bias=bias, key=query_key)
        shared = {"kv": 2, "kv_heads": num_kv_heads(model), **width}
        self.key_value = Linear(embed, shared, std=std, bias=bias, key=kv_key)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """Query [batch, seq, heads, head_dim], key and value [batch, seq, groups, head_dim].

        Groups are the key and value heads, or the model ways where those are more.
        """
        weight = _by_groups(self.query.weight[...], self.key_value.weight[...])
        biases = (self.query.bias, self.key_value.bias)
        bias = None if biases[0] is None or biases[1] is None else _by_groups(biases[0][...], biases[1][...])
        found = project(x, weight, bias, ("heads", None, "head_dim"))
        query, key, value = found[..., :-2, :], found[..., -2, :], found[..., -1, :]
        heads = query.shape[2] * query.shape[3]
        return query.reshape(*query.shape[:2], heads, -1, out_sharding=spec(*HEADS)), key, value


def _by_groups(query: Array, key_value: Array) -> Array:
    """[..., heads, head_dim] and [..., 2, kv_heads, head_dim] -> [..., groups, heads / groups + 2, head_dim]."""
    used = jnp.swapaxes(heads_in_use(key_value), -2, -3)
    groups, width = used.shape[-3], used.shape[-1]
    place = spec(*(None,) * (query.ndim - 2), "heads", None, None)
    grouped = query.reshape(*query.shape[:-2], groups, -1, width, out_sharding=place)
    return jnp.concatenate([grouped, used], axis=-2)


class SelfAttention(nnx.Module):
    """Self-attention with one product for query, key and value."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        qkv_key, output_key = jax.random.split(key)
        heads = {"heads": model.num_heads, "head_dim": head_dim(model)}
        is_grouped = num_kv_heads(model) != model.num_heads
        self.qkv = (GroupedQKV if is_grouped else FusedQKV)(model, key=qkv_key)
        self.output = Linear(heads, {"embed": model.hidden_size}, std=output_std, bias=model.bias, key=output_key)
        self.rate = model.attention_dropout
        self.flash = model.attention == "cudnn"

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        context: Context,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Attends from each token to those that the context lets it see."""
        x = reshard(x, spec("batch", "seq", "embed"))
        query, key, value = self.qkv(x)
        query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        if self.flash:
            mixed = flash_attention(query, key, value)
        else:
            mask = attention_mask(x.shape[1], context)
            mixed = core_attention(query, key, value, mask, self.rate, keys, bias=context.bias, scale=context.scale)
        return self.output(checkpoint_name(mixed, ATTENTION_OUTPUT))


def core_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq groups head_dim"],
    value: Float[Array, "batch seq groups head_dim"],
    mask: Bool[Array, "#batch 1 seq seq"],
    rate: float,
    keys: Key[Array, " batch"] | None,
    *,
    bias: Float[Array, "1 heads seq seq"] | None = None,
    scale: float | None = None,
    site: int = 0,
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax attention with the probabilities written out, normalised in float32.

    `bias` is added to the scores, `scale` is head_dim^-0.5 when None, `site` is that of the dropout.

    Each group of heads / groups queries in turn shares a key and a value head.
    """
    shape, place = query.shape, spec(*HEADS)
    query = query * (shape[-1] ** -0.5 if scale is None else scale)
    query = query.reshape(
        *shape[:2], key.shape[2], -1, shape[3], out_sharding=spec("batch", "seq", "heads", None, None)
    )
    # Both products come out as einsum has them, batch, left and right: in another order it would turn them around, and
    # XLA transpose what is seq x seq.
    scores = jnp.einsum("bgnqd,bkgd->bgnqk", query.transpose(0, 2, 3, 1, 4), key, preferred_element_type=jnp.float32)
    scores = scores.reshape(shape[0], shape[2], *scores.shape[3:], out_sharding=spec(*SCORES))
    probabilities = _softmax(jnp.where(mask, scores if bias is None else scores + bias, -1e30))
    probabilities = dropout(probabilities.astype(query.dtype), rate, keys, site, SCORES, kept_as=ATTENTION_CORE)
    grouped = spec("batch", "heads", None, "seq", "seq")
    probabilities = probabilities.reshape(shape[0], key.shape[2], -1, *probabilities.shape[2:], out_sharding=grouped)
    mixed = jnp.einsum("bgnqk,bkgd->bgnqd", probabilities, value)
    return mixed.transpose(0, 3, 1, 2, 4).reshape(shape, out_sharding=place)


def attention_mask(length: int, context: Context) -> Bool[Array, "#batch 1 seq seq"]:
    """True where a query (third dimension) may look at a key (fourth)."""
    if context.is_causal:
        return causal_mask(length, context.segment_ids)
    if context.segment_ids is None:
        return jnp.ones((1, 1, length, length), bool)
    return _same_segment(context.segment_ids)


@jax.custom_jvp
def _softmax(scores: Float[Array, "batch heads seq seq"]) -> Float[Array, "batch heads seq seq"]:
    """Softmax over keys whose result, unrounded, is what the backward pass is given.

    jax's own has a derivative that asks for the result before it has a name, and so computes the scores again.
    """
    return _named_softmax(scores)


def _named_softmax(scores: Array) -> Array:
    return checkpoint_name(jax.nn.softmax(scores, axis=-1), ATTENTION_CORE)


@_softmax.defjvp
def _softmax_derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    probabilities = _named_softmax(*primals)  # not `_softmax`: names inside a custom_jvp are not seen
    slope = probabilities * tangents[0]
    return probabilities, slope - probabilities * slope.sum(-1, keepdims=True)


def causal_mask(length: int, segment_ids: Int[Array, "batch seq"] | None) -> Bool[Array, "#batch 1 seq seq"]:
    """True where a query (third dimension) may look at a key (fourth)."""
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if segment_ids is None:
        return causal
    return causal & _same_segment(segment_ids)


def _same_segment(segment_ids: Int[Array, "batch seq"]) -> Bool[Array, "batch 1 seq seq"]:
    return segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
