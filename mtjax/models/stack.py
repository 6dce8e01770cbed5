"""Stacks of layers: parameters stacked along `layers`, and one traced program for all of them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model, Parallel
from mtjax.layout.stacks import LayerStack
from mtjax.layout.stages import stack_order
from mtjax.models.layer import Layer
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import LoopOverLayers, Recompute, loop_over_layers
from mtjax.sharding.axes import num_shards
from mtjax.sharding.param_comm import LayerInputs, materialize

Residual = Float[Array, "batch act_seq embed"]
"""Hidden states between layers (the residual stream)."""


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
        if not self.order.is_plain or own.layers < len(keys):
            # Padding takes any key: its parameters become zeros.
            keys = keys[np.maximum(self.order.flat, 0)]
        draw = partial(_draw_layer, layer_type, model, dtype, own.kind)
        # Stacked by `vmap`, so that each rank draws its shards of all of its layers in one program.
        if num_shards("layers") == 1:
            self.layers = jax.vmap(draw)(keys)
        else:
            from mtjax.models.padding_layers import draw_on_stages

            self.layers = draw_on_stages(draw, keys, self.order)
        self.recompute = recompute

    def over_layers(self, context: LayerContext, states: State = None) -> LoopOverLayers:
        """Returns the function of hidden states that runs all layers one after the other.

        Args:
          context: other inputs of all layers.
          states: the layers' states, each array stacked along `layers`; None in training.

        Returns:
          (hidden states) -> the hidden states, and the layers' new states, stacked likewise; None where no layer has
          any.
        """
        layers = LayerInputs(self.layers, jnp.asarray(self.order.flat), states)
        return loop_over_layers(partial(run_layer, context), layers, self.recompute)


def _draw_layer(layer_type: type[Layer], model: Model, dtype: jax.typing.DTypeLike, kind: str, key: Array) -> Layer:
    return layer_type(model, dtype, kind=kind, key=key)


def run_layer(context: LayerContext, x: Array, inputs: LayerInputs) -> tuple[Array, State]:
    """Runs one layer, with its number and its dropout keys.

    Args:
      context: of all layers.
      x: hidden states, [batch, act_seq, embed].
      inputs: of the layer; its parameters, a `Layer`, are perhaps wrapped: they are gathered here.
    """
    # Here ZeRO-3 gathers the layer's parameters, and reductions of gradients are attached (`param_comm`).
    return materialize(inputs.parameters)(x, context_of_layer(context, inputs.number), inputs.state)


def context_of_layer(context: LayerContext, number: Array) -> LayerContext:
    """Returns the context of a layer: with its number, int32 [], and its dropout keys."""
    keys = context.dropout_keys
    # A key per sample and layer: masks depend neither on the mesh nor on the stage or loop in which a layer runs.
    layer_keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
    return dataclasses.replace(context, dropout_keys=layer_keys, layer=number)
