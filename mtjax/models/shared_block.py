"""Shared blocks of hybrid models (Zamba2, arXiv 2411.15242): attention and an MLP that several Mamba-2 layers run.

A block reads the hidden states and the embeddings side by side. What it computes enters the layer's Mamba-2, through a
product of the layer's own, but not the residual stream. Its weights are one copy, outside the stacks of layers; each
layer adds low-rank adapters of its own to them.
"""

import dataclasses
from pkgutil import resolve_name
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.adapters import RANK, LoraConfig, adapters_of, joint_adapter_sizes
from mtjax.config.shared_blocks import BLOCK
from mtjax.config.sizes import head_dim, mlp_size, num_kv_heads
from mtjax.layout.weights import ProductSizes, block_products, mlp_products, replicated_product
from mtjax.models.layer import Layer
from mtjax.models.layer_context import LayerContext, State
from mtjax.models.lora import Adapter, first_factor, gather_sequence_shared
from mtjax.models.mixers.projected import ProjectedSelfAttention
from mtjax.models.mixers.transformer import MLP
from mtjax.models.ops import Linear, constant, make_norm, scaled
from mtjax.models.project import project

_KEY = 2**31 - 1
"""Folded into the key of the layers, for the blocks' initial values."""
_ADAPTED = "mtjax.models.adapted_block"
"""Imported where a model has adapters."""
_SITE = 0
"""Dropout site of the adapters' inputs, which have no dropout."""


def draw_blocks(model: Model, count: int, dtype: jax.typing.DTypeLike, key: Array) -> dict[str, "SharedBlock"]:
    """Draws so many blocks, by the names of their parameters; `key` is that of the layers."""
    keys = jax.random.split(jax.random.fold_in(key, _KEY), count)
    return {
        f"{BLOCK}{number}": SharedBlock(model, dtype, key=key_of_block) for number, key_of_block in enumerate(keys, 1)
    }


class SharedBlock(nnx.Module):
    """Attention and an MLP, each after a norm, without residual additions."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        """Draws the parameters."""
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = make_norm(_wide(model), dtype)
        attention, mlp = BlockAttention, BlockMLP
        if adapters_of(model, "attention"):
            attention = resolve_name(f"{_ADAPTED}:AdaptedBlockAttention")
        if adapters_of(model, "mlp"):
            mlp = resolve_name(f"{_ADAPTED}:AdaptedBlockMLP")
        self.attention = attention(model, output_std=model.init_std, key=attention_key)
        self.mlp_norm = make_norm(model, dtype)
        self.mlp = mlp(model, output_std=model.init_std, key=mlp_key)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: State
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Runs the block for the context's layer; `state` is the KV cache of that layer."""
        assert context.shared is not None
        with jax.named_scope(self.attention.scope):
            both = jnp.concatenate([x, context.shared.embedded.astype(x.dtype)], -1)
            x, state = self.attention(self.attention_norm(both), context, state)
        with jax.named_scope(self.mlp.scope):
            return self.mlp(self.mlp_norm(x), context, None)[0], state


def with_own_adapter(x: Array, context: LayerContext, name: str) -> tuple[Array, Array, Any]:
    """Returns the gathered input for a block's product, and for adapters, and the layer's adapter, if it has one."""
    return *gather_sequence_shared(x, _LOW, context, _SITE), _adapter(context, name)


class BlockAttention(ProjectedSelfAttention):
    """Self-attention whose input is twice as wide as its output, with the adapters of a layer."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(_wide(model), output_std=output_std, key=key)
        output, output_key = _attention_products(model)["output"], jax.random.split(key)[1]
        self.output = Linear(*output, std=output_std, bias=False, sequence="act_seq", key=output_key)

    def project_in(self, x: Array, context: LayerContext) -> tuple[Array, Array, Array]:
        """See `ProjectedSelfAttention.project_in`."""
        if _adapter(context, "attention_adapter") is None:
            return super().project_in(x, context)
        for_product, for_adapter, layer_adapter = with_own_adapter(x, context, "attention_adapter")
        qkv: Any = self.qkv  # a `FusedQKV`: there are as many key heads as query heads
        return qkv(for_product, lambda: layer_adapter(for_adapter))


class BlockMLP(MLP):
    """An MLP with the adapter of a layer."""

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """See `MLP.project_up`."""
        for_product, for_adapter, layer_adapter = with_own_adapter(x, context, "mlp_adapter")
        return self.up(for_product) + layer_adapter(for_adapter)


class UpAdapter(nnx.Module):
    """`(x A) B` of a gated MLP's first product, of which gate and up have one A, and each a B, 0 at first."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws A."""
        up = mlp_products(model.hidden_size, mlp_size(model), is_gated=True)["up"]
        sizes = joint_adapter_sizes(model.hidden_size, model.block_rank, {"b": up.outputs})
        self.a = first_factor(sizes["a"], model.hidden_size, key)
        self.b = constant(0.0, sizes["b"])

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq 2 mlp"]:
        """Computes what is added to the product."""
        low = project(x, self.a[...], None, (RANK,), "seq")
        return project(low, self.b[...], None, ("gate", "mlp"), save_for_backward=False)


class SharedLayer(Layer):
    """A Mamba-2 layer that reads a shared block, with its adapters of the block and its product after it."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, key: Array) -> None:
        """Draws the parameters of a layer of a kind in `mtjax.config.layer_pattern.SHARED`."""
        super().__init__(model, dtype, kind=kind, key=key)
        self.block = int(kind.rpartition("_")[2]) - 1
        attention_key, mlp_key, projection_key = jax.random.split(jax.random.fold_in(key, _KEY), 3)
        qkv, low = _attention_products(model)["qkv"], _LOW._replace(rank=model.block_rank)
        self.attention_adapter = Adapter(*qkv, low, key=attention_key) if model.block_attention_adapters else None
        self.mlp_adapter = UpAdapter(model, key=mlp_key)
        sizes = replicated_product(model.hidden_size, model.hidden_size)
        self.projection = Linear(*sizes, std=model.init_std, bias=False, sequence="act_seq", key=projection_key)

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, states: Any
    ) -> tuple[Float[Array, "batch act_seq embed"], dict[str, State] | None]:
        """See `Layer.__call__`; the states are those of the block's attention and of Mamba-2."""
        assert context.shared is not None
        before, mamba = states or {}, getattr(self, self.mixers[0])
        # A block is one module for all layers: it finds the adapters of the layer that runs it in the context.
        block_context = dataclasses.replace(context, shared=dataclasses.replace(context.shared, layer=self))
        read, cache = context.shared.blocks[self.block](x, block_context, before.get("attention"))
        with jax.named_scope("projection"):
            read = self.projection(read)
        with jax.named_scope(mamba.scope):
            # What the block has read enters Mamba-2's input alone: the sum below has x without it.
            mixed, state = mamba(self.normalize("mamba_norm", x + read), context, before.get("mamba"))
            x = self.add(x, scaled(mixed, self.output_scales["mamba"]), mamba, context)
        return x, None if state is None else {"attention": cache, "mamba": state}


_LOW = LoraConfig(1, 1.0, 0.0)
"""Adapters without scale and dropout; of a model's rank."""


def _adapter(context: LayerContext, name: str) -> Any:
    """Returns an adapter of the layer that runs a block; None where it has none."""
    assert context.shared is not None
    return getattr(context.shared.layer, name)


def _attention_products(model: Model) -> dict[str, ProductSizes]:
    """Returns the dimensions of the products of a block's attention, by name."""
    return block_products(model.hidden_size, model.num_heads, head_dim(model))


def _wide(model: Model) -> Model:
    """Returns the settings of what reads hidden states and embeddings side by side."""
    # Explicit, as their defaults follow from hidden_size, which is doubled.
    widths = {"head_dim": head_dim(model), "num_kv_heads": num_kv_heads(model)}
    return dataclasses.replace(model, hidden_size=2 * model.hidden_size, **widths)
