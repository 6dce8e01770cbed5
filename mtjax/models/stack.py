"""Stacks of layers: parameters stacked along `layers`, and one traced program for all of them."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model, Parallel
from mtjax.layout.stacks import LayerStack
from mtjax.layout.stages import PADDING, stack_order
from mtjax.models.layer import Layer
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import Recompute, scan_layers
from mtjax.sharding.axes import num_shards, spec
from mtjax.sharding.param_comm import materialize

Residual = Float[Array, "batch act_seq embed"]
"""Hidden states between layers (the residual stream)."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of a stack on one pipeline stage."""

    stage: Int[Array, ""]
    number: Int[Array, ""]
    """Index among the stage's chunks."""


class LayerSlice(NamedTuple):
    """Which layers of a stack run one after the other."""

    numbers: Int[Array, " layers"]
    """Numbers of the layers in the model, from which their dropout keys derive."""
    recompute: Recompute
    first: Int[Array, ""] | None = None
    """Index of the first in the stack's arrays; None where these hold just these layers."""
    is_padded: bool = False
    """Whether some numbers may be `PADDING`."""


class Stack(nnx.Module):
    """Layers of one kind, whose parameters are stacked along `layers`, in the order of `stack_order`."""

    def __init__(
        self,
        model: Model,
        dtype: jax.typing.DTypeLike,
        *,
        own: LayerStack,
        recompute: Recompute,
        parallel: Parallel,
        key: Array,
        layer_type: type[Layer] = Layer,
    ) -> None:
        """Draws the parameters.

        Args:
          model: sizes.
          dtype: of the products.
          own: kind and numbers of the layers.
          recompute: what each layer saves for its backward pass.
          parallel: which layers each stage has.
          key: split into one for each layer of the section.
          layer_type: class of the layers.
        """
        self.path = own.path
        self.order = stack_order(own, num_shards("layers"), parallel.chunks, parallel.layers_per_stage)
        # A layer draws from the key of its number, so that parameters do not depend on the pipeline's layer order.
        keys = jax.random.split(key, own.among or own.layers)
        numbers = np.asarray(self.order.flat)
        if not self.order.is_plain or own.layers < len(keys):
            # Padding takes any key: its parameters become zeros.
            keys = keys[np.maximum(numbers, 0)]

        def layer(key: Array, number: Array) -> Layer:
            drawn = layer_type(model, dtype, kind=own.kind, key=key)
            # Padding, on stages with fewer layers than the maximum, is zeros: they stay zeros, and do not change a
            # checksum.
            return jax.tree.map(lambda a: jnp.where(number == PADDING, 0, a), drawn) if self.order.is_padded else drawn

        keys_and_numbers = (keys, jnp.asarray(numbers))
        if num_shards("layers") > 1:
            keys_and_numbers = jax.tree.map(lambda a: reshard(a, spec("layers")), keys_and_numbers)
        # Stacked by `vmap`, so that each rank draws its shards of all of its layers in one program.
        self.layers = jax.vmap(layer)(*keys_and_numbers)
        self.recompute = recompute

    def __call__(
        self, x: Residual, context: LayerContext, states: State = None, chunk: Chunk | None = None
    ) -> tuple[Residual, State]:
        """Runs all layers, or a chunk of them, one after the other.

        Args:
          x: hidden states.
          context: other inputs of all layers.
          states: the layers' states, each array stacked along `layers`; None in training.
          chunk: which layers a pipeline stage runs; None for all.

        Returns:
          The hidden states, and the layers' new states, stacked likewise; None where no layer has any.
        """
        here = self.layer_slice(chunk)
        run = partial(run_layer, context, here.is_padded)
        with jax.named_scope("layers"):
            return scan_layers(run, x, self.layers, here.numbers, here.recompute, states, here.first)

    def layer_slice(self, chunk: Chunk | None) -> LayerSlice:
        """Selects all layers, or those of a chunk.

        Args:
          chunk: None for all.

        Returns:
          The layers' numbers, int32 [layers], with the recompute policy, the index of the first layer in this stage's
          arrays, and whether there is padding.
        """
        if chunk is None:
            return LayerSlice(jnp.asarray(self.order.flat), self.recompute)
        # `order.numbers` is [stages, chunks, layers of a chunk]. On a stage, parameters are stacked chunk by chunk.
        numbers = jnp.asarray(self.order.numbers)[chunk.stage, chunk.number]
        first = chunk.number * self.order.places if len(self.order.numbers[0]) > 1 else None
        return LayerSlice(numbers, self.recompute.in_chunk, first, self.order.is_padded)

    def scatter_counts(self, counts: Float[Array, " chunk_layers ..."], chunk: Chunk) -> Float[Array, " layers ..."]:
        """Moves the counters of a chunk's layers to their positions among all layers of the stack; zeros elsewhere."""
        all_layers = jnp.asarray(sorted(set(self.order.flat) - {PADDING}))
        numbers = jnp.asarray(self.order.numbers)[chunk.stage, chunk.number]
        is_same = (all_layers[:, None] == numbers).reshape(-1, len(numbers), *(1,) * (counts.ndim - 1))
        return jnp.where(is_same, counts, 0).sum(1)


def run_layer(
    context: LayerContext, is_padded: bool, x: Array, layer: Layer, number: Array, state: State
) -> tuple[Array, State]:
    """Runs one layer, with its number and its dropout keys; skips a padding layer.

    Args:
      context: of all layers.
      is_padded: whether `number` may be `PADDING`.
      x: hidden states, [batch, act_seq, embed].
      layer: its parameters, perhaps wrapped: they are gathered here.
      number: of the layer, int32 [].
      state: of the layer.
    """
    keys = context.dropout_keys
    # A key per sample and layer: masks depend neither on the mesh nor on the stage or loop in which a layer runs.
    layer_keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
    own = dataclasses.replace(context, dropout_keys=layer_keys, layer=number)
    if not is_padded:
        # Here ZeRO-3 gathers the layer's parameters, and reductions of gradients are attached (`param_comm`).
        return materialize(layer)(x, own, state)
    from mtjax.models.padding_layers import run_unless_padding

    return run_unless_padding(lambda x: materialize(layer)(x, own, state), number, x)
