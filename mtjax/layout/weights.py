"""The products of layers: their names and the names and sizes of their dimensions, which models draw and the analysis
counts."""

from collections.abc import Mapping
from typing import NamedTuple

Sizes = Mapping[str, int]
"""Logical name of a dimension -> its size."""


class ProductSizes(NamedTuple):
    """Dimensions of a weight [*inputs, *outputs]; a bias has `outputs`."""

    inputs: Sizes
    outputs: Sizes

    @property
    def weight(self) -> dict[str, int]:
        """Dimensions of the weight."""
        return {**self.inputs, **self.outputs}


def mlp_products(hidden: int, inner: int, *, is_gated: bool) -> dict[str, ProductSizes]:
    """Returns an MLP's products, by name; a gated one has one for gate and up."""
    embed, mlp, gate = {"embed": hidden}, {"mlp": inner}, {"gate": 2} if is_gated else {}
    return {"up": ProductSizes(embed, {**gate, **mlp}), "down": ProductSizes(mlp, embed)}


def expert_products(hidden: int, inner: int, count: int, *, is_gated: bool) -> dict[str, ProductSizes]:
    """Returns the products of all experts, by name: those of an MLP each."""
    each, of_mlp = {"expert": count}, mlp_products(hidden, inner, is_gated=is_gated)
    return {name: ProductSizes({**each, **sizes.inputs}, sizes.outputs) for name, sizes in of_mlp.items()}


def attention_products(hidden: int, num_heads: int, kv_heads: int, head_dim: int) -> dict[str, ProductSizes]:
    """Returns the products of self-attention, by name: query, key and value are one, or with fewer KV heads two."""
    embed, width = {"embed": hidden}, {"head_dim": head_dim}
    heads = {"heads": num_heads, **width}
    if kv_heads == num_heads:
        inputs = {"qkv": ProductSizes(embed, {"qkv": 3, **heads})}
    else:
        inputs = {
            "qkv.query": ProductSizes(embed, heads),
            "qkv.key_value": ProductSizes(embed, {"kv": 2, "kv_heads": kv_heads, **width}),
        }
    return {**inputs, "output": ProductSizes(heads, embed)}


def cross_products(hidden: int, num_heads: int, head_dim: int) -> dict[str, ProductSizes]:
    """Returns the products of cross-attention, by name: of the decoder's tokens, and of the encoder's."""
    embed, heads = {"embed": hidden}, {"heads": num_heads, "head_dim": head_dim}
    return {
        "query": ProductSizes(embed, heads),
        "key_value": ProductSizes(embed, {"kv": 2, **heads}),
        "output": ProductSizes(heads, embed),
    }
