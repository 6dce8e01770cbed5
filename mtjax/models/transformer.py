"""Transformer layers, stacked and scanned."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Key

from mtjax.config import GATED, Model, mlp_size
from mtjax.models.attention import Context, SelfAttention
from mtjax.models.layers import Linear, dropout, make_norm
from mtjax.models.recompute import Recompute, scan_layers
from mtjax.sharding.axes import spec
from mtjax.sharding.parameters import materialize

RESIDUAL = ("batch", "act_seq", "embed")

EMBEDDING_SITE = 2**31 - 1
"""Dropout site of the embeddings, apart from every layer's number."""


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """[batch, seq, 2, mlp], the gate first -> [batch, seq, mlp] (arXiv 2002.05202)."""
    return lambda x: activation(x[:, :, 0]) * x[:, :, 1]


_gelu = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": _gated(jax.nn.silu),
    "geglu": _gated(_gelu),
}


class MLP(nnx.Module):
    """Column-parallel, activation, row-parallel: one all-reduce forward, one backward (Figure 3a of the paper)."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        up_key, down_key = jax.random.split(key)
        embed, inner = {"embed": model.hidden_size}, {"mlp": mlp_size(model)}
        gate = {"gate": 2} if model.activation in GATED else {}
        self.up = Linear(embed, {**gate, **inner}, std=model.init_std, bias=model.bias, key=up_key)
        self.down = Linear(inner, embed, std=output_std, bias=model.bias, key=down_key)
        self.activation = ACTIVATIONS[model.activation]

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to each token."""
        x = reshard(x, spec("batch", "seq", "embed"))
        return self.down(self.activation(self.up(x)))


Part = Callable[[Array], Array]


def pre_norm(x: Array, norm: Part, sublayer: Part, drop: Part) -> Array:
    """The norm reads the residual stream and leaves it clean (Figure 7b of the paper)."""
    return x + drop(sublayer(norm(x)))


def post_norm(x: Array, norm: Part, sublayer: Part, drop: Part) -> Array:
    """The norm is part of the residual stream: the original BERT (Figure 7a of the paper)."""
    return norm(x + drop(sublayer(x)))


CONNECTIONS: Mapping[str, Callable[[Array, Part, Part, Part], Array]] = {"pre": pre_norm, "post": post_norm}


class Layer(nnx.Module):
    """One transformer layer: attention and an MLP, each connected to the residual stream as `norm_placement` says."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        attention_key, mlp_key = jax.random.split(key)
        output_std = model.init_std / (2 * model.num_layers) ** 0.5 if model.scaled_init else model.init_std
        self.attention_norm = make_norm(model, dtype)
        self.attention = SelfAttention(model, output_std=output_std, key=attention_key)
        self.mlp_norm = make_norm(model, dtype)
        self.mlp = MLP(model, output_std=output_std, key=mlp_key)
        self.connect = CONNECTIONS[model.norm_placement]
        self.rate = model.hidden_dropout

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        context: Context,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Adds what attention and the MLP find to the residual stream."""
        with jax.named_scope("attention"):
            attend = partial(self.attention, context=context, keys=keys)
            x = self.connect(x, self.attention_norm, attend, self.dropout(1, keys))
        with jax.named_scope("mlp"):
            return self.connect(x, self.mlp_norm, self.mlp, self.dropout(2, keys))

    def dropout(self, site: int, keys: Key[Array, " batch"] | None) -> Part:
        """Dropout of what enters the residual stream at a site of the layer."""
        return lambda x: dropout(x, self.rate, keys, site, RESIDUAL)


class Stack(nnx.Module):
    """`num_layers` layers whose parameters are stacked along `layers`: one program for all of them."""

    def __init__(
        self, model: Model, dtype: jax.typing.DTypeLike, *, recompute: Recompute, key: Array, kind: type[Layer] = Layer
    ) -> None:
        keys = jax.random.split(key, model.num_layers)
        self.layers = jax.vmap(lambda key: kind(model, dtype, key=key))(keys)
        self.num_layers = model.num_layers
        self.recompute = recompute

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        context: Context,
        keys: Key[Array, " batch"] | None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Runs all layers; `keys` are per sample and become each layer's own by its number."""

        def run(x: Array, layer: Layer, number: Array) -> Array:
            layer = materialize(layer)
            own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            return layer(x, context, own)

        with jax.named_scope("layers"):
            return scan_layers(run, x, self.layers, self.num_layers, self.recompute)
