"""Weights for generation: separate arrays for each layer instead of stacks, matrices in their `WeightFormat`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from mtjax.generate.byte_matrix import to_bytes
from mtjax.generate.weight_format import WeightFormat, with_matrices
from mtjax.layout.stages import PADDING
from mtjax.models.layer import Layer
from mtjax.models.mixers.latent_attention import LatentAttention
from mtjax.models.prediction import remove_predictors
from mtjax.models.sharded_model import ShardedModel

Tree = Any
Call = Callable[..., Any]
"""Calls a compiled function, or returns its output shapes if the arguments are abstract."""
Stacks = Iterator[tuple[Any, int]]
"""For each layer, a stack (whose arrays have layers along their first dimension) and the layer's index in it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderWeights:
    """A model without its layers, and its layers in order."""

    model: Any
    layers: list[Any]
    """A `Layer` each, with its mixers as attributes."""


def prepare_weights(
    model: Any, stacks: Stacks, weight_format: WeightFormat, call: Call, grids: Sequence[Stacks] = ()
) -> DecoderWeights:
    """Converts a model without its layers, and the layers; must be called with mesh and rules in force.

    Args:
      model: without its layers.
      stacks: the layers.
      weight_format: of matrices.
      call: calls a program.
      grids: scales, and perhaps zero points, of matrices that were quantized before, as layers of their shapes.
    """
    converted = jax.jit(partial(_layer, weight_format))
    # The index is a traced argument: one compiled program serves all layers of a stack.
    layers = [
        call(converted, [stack, *(other for other, _ in others)], np.int32(index))
        for (stack, index), *others in zip(stacks, *grids, strict=True)
    ]
    return DecoderWeights(call(jax.jit(partial(_outer_weights, weight_format)), model), layers)


def stacks_of(sharded_model: ShardedModel, parameters: Tree) -> tuple[Any, Stacks]:
    """Builds the model from stored parameters, on a mesh without pipeline parallelism; returns it and its layers."""
    model, locations = layer_locations(sharded_model.inference_model(parameters))
    return model, iter(locations)


def layer_locations(model: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """Removes a model's layers; returns the model, and the stack and index of each layer in order."""
    found = []
    # Layers of multi-token prediction only train: generation predicts one token.
    remove_predictors(model)
    for stack in model.decoder_stacks:
        # A stack is stored in the order of pipeline stages, with padding where layers don't divide evenly; `order` has
        # the numbers of the layers in the model.
        found += [(number, index, stack.layers) for index, number in enumerate(stack.order.flat) if number != PADDING]
        # `prepare_weights` converts the rest of the model separately.
        stack.layers = None
    # The key is the number alone: stacks can't be compared.
    return model, [(layers, index) for _, index, layers in sorted(found, key=lambda each: each[0])]


def _layer(weight_format: WeightFormat, stacks: Sequence[Layer], number: Array) -> Layer:
    """Extracts one layer from a stack and converts its matrices; grids are in further stacks."""
    layer, *grids = (take_layer(stack, number) for stack in stacks)
    return with_matrices(layer, weight_format, *grids)


def take_layer(stack: Layer, number: Array) -> Layer:
    """Extracts one layer from a stack, with its matrices as products in generation read them."""
    layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), stack)
    for mixer in (getattr(layer, name) for name in layer.mixers):
        # Training stores the parts of some products separately; one matrix product is faster for a single token.
        for name in ("qkv", "inputs"):
            part: Any = getattr(mixer, name, None)
            if hasattr(part, "assembled"):
                setattr(mixer, name, part.assembled())
        if isinstance(mixer, LatentAttention):
            # Multi-head latent attention as in DeepSeek-V2: the up-projection is applied to queries and outputs, so
            # that the cache has latents and not keys and values of each head.
            mixer.key_value_up = mixer.absorbed()
    return layer


def _outer_weights(weight_format: WeightFormat, model: Any) -> Any:
    """Converts the parameters outside of the layers."""
    # Before the cast: the scales are those of the stored float32 weights.
    table = model.output_table[...]
    model = with_matrices(model, lambda matrix, _: matrix.astype(weight_format.dtype))
    kind = weight_format.storage.weights_dtype
    if kind in ("int8", "fp8"):
        # A scale for each row, so that a tied table also serves the embedding lookup.
        model.output_table.set_value(to_bytes(table, (1,), kind))
    return model
