"""Low-rank adapters (LoRA): `x A B` beside a frozen product, split over the mesh like its matrix.

Beside a column-parallel product A is on every rank and B is split like the matrix; beside a row-parallel one A is split
and B is on every rank. What goes between the two, `rank` numbers a token, is all that ranks send each other for them.
"""

from collections.abc import Mapping
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.models.dropout import dropout
from mtjax.models.layer_context import LayerContext
from mtjax.models.project import project, reshard_sequence
from mtjax.sharding.axes import spec
from mtjax.theory.adapters import PARTS, LoraConfig, adapter_sizes

INIT = 7
"""Folded into a layer's key for the adapters' initial values."""


class Adapter(nnx.Module):
    """`scale (x A) B`; B begins at 0, so that the first step's model is the one without it. A is drawn as peft's is."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        low: LoraConfig,
        *,
        sequence: str = "seq",
        key: Array,
    ) -> None:
        into, out = adapter_sizes(inputs, outputs, low.rank)
        bound = prod(inputs.values()) ** -0.5
        drawn = jax.random.uniform(jax.random.fold_in(key, INIT), tuple(into.values()), out_sharding=spec(*into))
        self.a = nnx.Param(bound * (2 * drawn - 1), axes=tuple(into))
        self.b = nnx.Param(jnp.zeros(tuple(out.values()), jnp.float32, out_sharding=spec(*out)), axes=tuple(out))
        self.inner = tuple(name for name in into if name not in inputs)
        self.scale, self.sequence = low.scale, sequence

    def __call__(
        self, x: Float[Array, "batch seq ..."], b: Array | None = None, outputs: tuple[str, ...] | None = None
    ) -> Float[Array, "batch seq ..."]:
        """What is added to the product's output, in the type of x.

        Args:
          x: [batch, seq, *inputs], what the product reads.
          b: another B with more heads, where ranks share those of this one.
          outputs: logical names of its dimensions behind the rank.
        """
        b = self.b[...] if b is None else b
        names = self.b.get_metadata()["axes"][len(self.inner) :] if outputs is None else outputs
        low = self.scale * project(x, self.a[...], None, self.inner, self.sequence)
        if self.inner[0] not in PARTS:
            return project(low, b, None, names, self.sequence, save_for_backward=False)
        parts = [
            project(low[:, :, i], b[i], None, names, self.sequence, save_for_backward=False) for i in range(b.shape[0])
        ]
        return jnp.stack(parts, axis=2)


def lora_input_dropout(
    x: Float[Array, "batch seq ..."], low: LoraConfig | None, context: LayerContext, site: int, *names: str
) -> Array:
    """What an adapter reads of x, the input of its product; `names` are those of x's dimensions behind `seq`."""
    rate = low.dropout if low else 0.0
    return dropout(x, rate, context.dropout_keys, site, ("batch", "seq", *names), places=context.positions)


def gather_sequence_shared(
    x: Float[Array, "batch act_seq embed"], low: LoraConfig | None, context: LayerContext, site: int
) -> tuple[Array, ...]:
    """Whole sequences for a column-parallel product and, where it has one, for its adapter, gathered once.

    Adapters that read the same - of query, key and value, of gate and up - share a mask of dropout, of this site.

    Their gradients are split again each by itself, before they are added: the product's is a sum over ranks, of which
    each needs its own part, and the adapter's is on every rank already.
    """
    if low is None:
        return (reshard_sequence(x, "seq"),)
    ours, adapters = _read_by_both(x)
    return ours, lora_input_dropout(adapters, low, context, site, "embed")


@jax.custom_vjp
def _read_by_both(x: Array) -> tuple[Array, Array]:
    whole = reshard_sequence(x, "seq")
    return whole, whole


def _read_forward(x: Array) -> tuple[tuple[Array, Array], None]:
    return _read_by_both(x), None


def _read_backward(_: None, gradients: tuple[Array, Array]) -> tuple[Array]:
    ours, adapters = (reshard_sequence(g, "act_seq") for g in gradients)
    return (ours + adapters,)


_read_by_both.defvjp(_read_forward, _read_backward)
