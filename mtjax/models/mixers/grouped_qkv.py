"""Grouped-query attention: query, key and value where there are fewer KV heads than query heads."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import attention_biases
from mtjax.models.kernels.xla import HEADS
from mtjax.models.mixers.transformer import has_plain_queries_and_keys, self_attention_products
from mtjax.models.ops import Linear
from mtjax.models.project import ProductRule, project
from mtjax.models.project_apart import computes_apart
from mtjax.models.saved_names import is_unrolled
from mtjax.sharding.axes import spec
from mtjax.sharding.kv_heads import heads_in_use


class GroupedQKV(nnx.Module):
    """Groups of query heads that share a key and a value head (arXiv 2305.13245), in one product.

    The product's weight is assembled by groups, each with its queries, its key and its value, so that a rank computes
    entire groups, and the backward pass reduces one cotangent of `x`.
    """

    rule: ProductRule | None = None
    """Of the product; see `project`."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the weights, [embed, heads, head_dim] and [embed, 2, kv_heads, head_dim]."""
        # Two parameters: there may be fewer KV heads than tensor parallel ranks, which then all have them (`kv_heads`).
        query_key, kv_key = jax.random.split(key)
        sizes = self_attention_products(model)
        settings = {"std": model.init_std, "bias": attention_biases(model)[0]}
        self.query = Linear(*sizes["qkv.query"], **settings, key=query_key)
        self.key_value = Linear(*sizes["qkv.key_value"], **settings, key=kv_key)
        self.has_plain_queries_and_keys = has_plain_queries_and_keys(model)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """Computes query [batch, seq, heads, head_dim], key and value [batch, seq, groups, head_dim].

        The number of groups is that of KV heads, or the tensor parallel degree if that is larger.
        """
        save = not (is_unrolled() and self.has_plain_queries_and_keys)
        if not computes_apart(("kv", "heads")):
            return grouped_product(x, *self._assembled(), save_for_backward=save, rule=self.rule)
        # No rank shares the gradient of their input: a product each.
        weights, biases = (self.query.weight, self.key_value.weight), (self.query.bias, self.key_value.bias)
        query, pair = (
            project(x, w[...], None if b is None else b[...], names, save_for_backward=save, by_sample=True)
            for w, b, names in zip(weights, biases, (HEADS[2:], ("kv", "kv_heads", "head_dim")), strict=True)
        )
        key, value = (a.squeeze(2) for a in jnp.split(pair, 2, axis=2))
        return query, key, value

    def assembled(self) -> "AssembledQKV":
        """Assembles the parameters once, for many products with few tokens (generation)."""
        return AssembledQKV(*self._assembled())

    def _assembled(self) -> tuple[Array, Array | None]:
        """Returns weight [embed, groups, heads / groups + 2, head_dim], and bias without the first dimension."""
        weight = jax.tree.map(_by_groups, self.query.weight[...], self.key_value.weight[...])
        biases = (self.query.bias, self.key_value.bias)
        return weight, None if biases[0] is None or biases[1] is None else _by_groups(biases[0][...], biases[1][...])


class AssembledQKV(nnx.Module):
    """`GroupedQKV` with assembled parameters, [embed, groups, heads / groups + 2, head_dim]; not for training."""

    has_plain_queries_and_keys = False
    rule: ProductRule | None = None

    def __init__(self, weight: Array, bias: Array | None) -> None:
        names = ("heads", None, "head_dim")
        self.weight = nnx.Param(weight, axes=("embed", *names))
        self.bias = None if bias is None else nnx.Param(bias, axes=names)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> tuple[Array, Array, Array]:
        """See `GroupedQKV.__call__`."""
        return grouped_product(x, self.weight[...], None if self.bias is None else self.bias[...])


def grouped_product(
    x: Array, weight: Array, bias: Array | None, *, save_for_backward: bool = True, rule: ProductRule | None = None
) -> tuple[Array, Array, Array]:
    """Computes query, key and value from x [batch, seq, embed] and assembled parameters."""
    # [batch, seq, groups, heads / groups + 2, head_dim]: a group's queries, then its key, then its value.
    names = ("heads", None, "head_dim")
    product = project(x, weight, bias, names, save_for_backward=save_for_backward, by_sample=True, rule=rule)
    query, key, value = product[..., :-2, :], product[..., -2, :], product[..., -1, :]
    heads = query.shape[2] * query.shape[3]
    return query.reshape(*query.shape[:2], heads, -1, out_sharding=spec(*HEADS)), key, value


def _by_groups(query: Array, key_value: Array) -> Array:
    """Assembles [..., heads, head_dim] and [..., 2, kv_heads, head_dim] to [..., groups, heads / groups + 2,
    head_dim]."""
    # [..., groups, 2, head_dim]: key and value of a group become its last two columns.
    used = jnp.swapaxes(heads_in_use(key_value), -2, -3)
    groups, width = used.shape[-3], used.shape[-1]
    sharding = spec(*(None,) * (query.ndim - 2), "heads", None, None)
    grouped = query.reshape(*query.shape[:-2], groups, -1, width, out_sharding=sharding)
    return jnp.concatenate([grouped, used.astype(query.dtype)], axis=-2)
