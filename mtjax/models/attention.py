"""Multi-head self-attention, split by heads: no communication between its two projections (Figure 3b of the paper)."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Bool, Float, Int, Key

from mtjax.config import Config, Model
from mtjax.models.layers import Linear, dropout
from mtjax.sharding.axes import spec
from mtjax.sharding.flash import flash_attention

HEADS = ("batch", "seq", "heads", "head_dim")
SCORES = ("batch", "heads", "seq", "seq")


class SelfAttention(nnx.Module):
    """Causal self-attention with one product for query, key and value."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        qkv_key, output_key = jax.random.split(key)
        embed = {"embed": model.hidden_size}
        heads = {"heads": model.num_heads, "head_dim": model.hidden_size // model.num_heads}
        self.qkv = Linear(embed, {"qkv": 3, **heads}, std=model.init_std, key=qkv_key)
        self.output = Linear(heads, embed, std=output_std, key=output_key)
        self.rate = model.attention_dropout
        self.flash = model.attention == "cudnn"

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Attends from each token to those before it, in the same segment when `segment_ids` is given."""
        x = reshard(x, spec("batch", "seq", "embed"))
        query, key, value = (a.squeeze(2) for a in jnp.split(self.qkv(x), 3, axis=2))
        if self.flash:
            mixed = flash_attention(query, key, value)
        else:
            mixed = core_attention(query, key, value, causal_mask(x.shape[1], segment_ids), self.rate, keys)
        return self.output(mixed)


def choose_kernel(config: Config, platform: str) -> tuple[Literal["cudnn", "xla"], str | None]:
    """The attention kernel of a run on devices of `platform`, and why it is not the one that was asked for, if so."""
    wanted, model = config.model.attention, config.model
    head_dim = model.hidden_size // model.num_heads
    obstacles = {
        "it runs on GPUs only": platform not in ("gpu", "cuda"),
        f"it has no dropout on probabilities, and attention_dropout is {model.attention_dropout}": (
            model.attention_dropout > 0
        ),
        f"it computes in 16 bits, and compute_dtype is {config.training.compute_dtype}": (
            config.training.compute_dtype == "float32"
        ),
        f"it takes head sizes up to 128 that are multiples of 8, and this one is {head_dim}": (
            head_dim % 8 != 0 or head_dim > 128
        ),
        "it does not keep documents apart (reset_attention_mask)": config.data.reset_attention_mask,
    }
    reason = next((reason for reason, holds in obstacles.items() if holds), None)
    if wanted == "xla" or reason:
        return "xla", reason if wanted == "cudnn" else None
    return "cudnn", None


def core_attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq heads head_dim"],
    value: Float[Array, "batch seq heads head_dim"],
    mask: Bool[Array, "#batch 1 seq seq"],
    rate: float,
    keys: Key[Array, " batch"] | None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Softmax attention with the probabilities written out, normalised in float32."""
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1).astype(query.dtype)
    probabilities = dropout(probabilities, rate, keys, 0, SCORES)
    return jnp.einsum("bnqk,bknd->bqnd", probabilities, value)


def causal_mask(length: int, segment_ids: Int[Array, "batch seq"] | None) -> Bool[Array, "#batch 1 seq seq"]:
    """True where a query (third dimension) may look at a key (fourth)."""
    causal = jnp.tril(jnp.ones((length, length), bool))[None, None]
    if segment_ids is None:
        return causal
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return causal & same
