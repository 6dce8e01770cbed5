"""Low-rank adapters (LoRA, arXiv 2106.09685): `x A B` added to a frozen product, sharded like its matrix.

For a column-parallel product A is replicated and B is sharded like the matrix; for a row-parallel one A is sharded and
B is replicated. Ranks communicate only `x A`, `rank` numbers per token.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config.adapters import ADAPTER, EXPERT, PARTS, LoraConfig, adapter_sizes
from mtjax.models.layer_context import LayerContext
from mtjax.models.ops import dropout
from mtjax.models.project import project, reshard_sequence
from mtjax.sharding.axes import spec

INIT = 7
"""Folded into a layer's key, for the adapters' initial values."""


class Adapter(nnx.Module):
    """`scale (x A) B`. B is initialized to 0, so that the model begins as the one without adapters; A as peft does."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        low: LoraConfig,
        *,
        sequence: str = "seq",
        key: Array,
    ) -> None:
        """Draws A and builds B, for a product of these inputs and outputs."""
        # A [*inputs, rank] and B [rank, *outputs]; a fused product has a component dimension in front of the rank.
        into, out = adapter_sizes(inputs, outputs, low.rank)
        self.a = first_factor(into, prod(size for name, size in inputs.items() if name != EXPERT), key)
        self.b = nnx.Param(jnp.zeros(tuple(out.values()), jnp.float32, out_sharding=spec(*out)), axes=tuple(out))
        self.inner = tuple(name for name in into if name not in inputs)
        self.scale, self.sequence = low.scale, sequence

    def __call__(
        self, x: Float[Array, "batch seq ..."], b: Array | None = None, outputs: tuple[str, ...] | None = None
    ) -> Float[Array, "batch seq ..."]:
        """Computes `scale (x A) B`, [batch, seq, *outputs], in the type of x.

        Args:
          x: [batch, seq, *inputs], the product's input.
          b: another B with more heads, where several ranks compute with the same KV head.
          outputs: logical names of that B's dimensions after the rank.
        """
        with jax.named_scope(ADAPTER):
            return self._product(x, self.b[...] if b is None else b, outputs)

    def _product(self, x: Array, b: Array, outputs: tuple[str, ...] | None) -> Array:
        """Computes `scale (x A) B`, [batch, seq, *outputs], for each component of a fused product."""
        names = self.b.get_metadata()["axes"][len(self.inner) :] if outputs is None else outputs
        # The scale on `rank` numbers per token, which are fewer than the outputs.
        low = self.scale * project(x, self.a[...], None, self.inner, self.sequence)
        if self.inner[0] not in PARTS:
            # Cheap to compute again from `x A`, which is saved.
            return project(low, b, None, names, self.sequence, save_for_backward=False)
        # A fused product (query, key and value; gate and up) has an A and a B for each of its components.
        components = [
            project(low[:, :, i], b[i], None, names, self.sequence, save_for_backward=False) for i in range(b.shape[0])
        ]
        return jnp.stack(components, axis=2)


def first_factor(sizes: Mapping[str, int], num_inputs: int, key: Array) -> nnx.Param:
    """Draws A, uniform within `num_inputs ** -0.5`.

    Args:
      sizes: its dimensions by logical name.
      num_inputs: numbers that a number of its product sums.
      key: that of the weight.
    """
    # peft's Kaiming uniform with a = sqrt(5) is uniform within inputs^-0.5.
    drawn = jax.random.uniform(jax.random.fold_in(key, INIT), tuple(sizes.values()), out_sharding=spec(*sizes))
    return nnx.Param(num_inputs**-0.5 * (2 * drawn - 1), axes=tuple(sizes))


def add_adapter(product: Any, num_inputs: int, low: LoraConfig, key: Array) -> None:
    """Adds an adapter to a module with a weight, as its attribute `lora`.

    Args:
      product: with `weight` [*inputs, *outputs], and `sequence` where its output is not along "seq".
      num_inputs: dimensions of the input.
      low: settings.
      key: that of the weight.
    """
    sizes = list(zip(product.weight.get_metadata()["axes"], product.weight.shape, strict=True))
    inputs, outputs = dict(sizes[:num_inputs]), dict(sizes[num_inputs:])
    product.lora = Adapter(inputs, outputs, low, sequence=getattr(product, "sequence", "seq"), key=key)


def adapter_of(product: Any) -> Adapter:
    """Returns the adapter that `add_adapter` has added."""
    return product.lora


def lora_input_dropout(
    x: Float[Array, "batch seq ..."],
    low: LoraConfig,
    context: LayerContext,
    site: int,
    *names: str,
    sequence: str = "seq",
) -> Array:
    """Applies the adapter's dropout to x, the input of its product; `names` are those of x's dimensions after its
    sequence."""
    # On the adapter's input alone, as in peft: the frozen product reads everything.
    dims = ("batch", sequence, *names)
    return dropout(x, low.dropout, context.dropout_keys, site, dims, positions=context.positions)


def gather_sequence_shared(
    x: Float[Array, "batch act_seq embed"], low: LoraConfig, context: LayerContext, site: int
) -> tuple[Float[Array, "batch seq embed"], Float[Array, "batch seq embed"]]:
    """All-gathers sequences once: returns the input of a column-parallel product and that of its adapter.

    Adapters that have the same input - of query, key and value, of gate and up - share a dropout mask, of this site.
    """
    for_product, for_adapter = _gather_for_both(x)
    return for_product, lora_input_dropout(for_adapter, low, context, site, "embed")


@jax.custom_vjp
def _gather_for_both(x: Array) -> tuple[Array, Array]:
    """Returns x [batch, act_seq, embed] gathered along its sequence: for a column-parallel product, and for its
    adapter."""
    gathered = reshard_sequence(x, "seq")
    return gathered, gathered


def _gather_forward(x: Array) -> tuple[tuple[Array, Array], None]:
    return _gather_for_both(x), None


def _gather_backward(_: None, gradients: tuple[Array, Array]) -> tuple[Array]:
    """Shards both gradients along the sequence, then adds them."""
    # Autodiff would add first. But the product's gradient is a partial sum, which needs a reduce-scatter, and the
    # adapter's is complete on every rank, and needs a slice.
    of_product, of_adapter = (reshard_sequence(g, "act_seq") for g in gradients)
    return (of_product + of_adapter,)


_gather_for_both.defvjp(_gather_forward, _gather_backward)
