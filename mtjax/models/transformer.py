"""Pre-LN transformer layers, stacked and scanned."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import reshard
from jaxtyping import Float, Int, Key

from mtjax.config import Model, mlp_size
from mtjax.models.attention import SelfAttention
from mtjax.models.layers import LayerNorm, Linear, dropout
from mtjax.sharding.axes import spec

RESIDUAL = ("batch", "act_seq", "embed")


class MLP(nnx.Module):
    """Column-parallel, GELU, row-parallel: one all-reduce forward, one backward (Figure 3a of the paper)."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        up_key, down_key = jax.random.split(key)
        embed, inner = {"embed": model.hidden_size}, {"mlp": mlp_size(model)}
        self.up = Linear(embed, inner, std=model.init_std, key=up_key)
        self.down = Linear(inner, embed, std=output_std, key=down_key)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to each token."""
        x = reshard(x, spec("batch", "seq", "embed"))
        return self.down(jax.nn.gelu(self.up(x), approximate=True))


class Layer(nnx.Module):
    """One transformer layer; norms read the residual stream and leave it clean (Figure 7b of the paper)."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        attention_key, mlp_key = jax.random.split(key)
        output_std = model.init_std / (2 * model.num_layers) ** 0.5 if model.scaled_init else model.init_std
        self.attention_norm = LayerNorm(model.hidden_size, model.norm_epsilon, dtype)
        self.attention = SelfAttention(model, output_std=output_std, key=attention_key)
        self.mlp_norm = LayerNorm(model.hidden_size, model.norm_epsilon, dtype)
        self.mlp = MLP(model, output_std=output_std, key=mlp_key)
        self.rate = model.hidden_dropout

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Adds what attention and the MLP find to the residual stream."""
        with jax.named_scope("attention"):
            found = self.attention(self.attention_norm(x), segment_ids, keys)
            x = x + dropout(found, self.rate, keys, 1, RESIDUAL)
        with jax.named_scope("mlp"):
            found = self.mlp(self.mlp_norm(x))
            return x + dropout(found, self.rate, keys, 2, RESIDUAL)


class Stack(nnx.Module):
    """`num_layers` layers whose parameters are stacked along `layers`: one program for all of them."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, recompute: bool, key: Array) -> None:
        keys = jax.random.split(key, model.num_layers)
        self.layers = jax.vmap(lambda key: Layer(model, dtype, key=key))(keys)
        self.num_layers = model.num_layers
        self.recompute = recompute

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        segment_ids: Int[Array, "batch seq"] | None,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Runs all layers; `keys` are per sample and become each layer's own by its number."""

        def run(x: Array, numbered: tuple[Layer, Array]) -> tuple[Array, None]:
            layer, number = numbered
            own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            return layer(x, segment_ids, own), None

        body: Callable[..., Any] = run
        if self.recompute:
            body = jax.checkpoint(run, policy=jax.checkpoint_policies.nothing_saveable)
        with jax.named_scope("layers"):
            return lax.scan(body, x, (self.layers, jnp.arange(self.num_layers)))[0]
