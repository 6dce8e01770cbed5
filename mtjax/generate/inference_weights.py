"""A model's weights as generating keeps them: each layer's arrays of its own, matrices in the compute type."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from mtjax.generate.weight_format import WeightFormat, with_matrices
from mtjax.models.layer import Layer
from mtjax.models.mixers.attention import GroupedQKV
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.int8 import to_int8
from mtjax.theory.stages import PADDING

Tree = Any
Call = Callable[..., Any]
"""Calls a compiled function; or, of abstract arguments, says what it would return."""
Stacks = Iterator[tuple[Any, int]]
"""For each layer a stack, whose arrays have layers along their first dimension, and its place there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderWeights:
    """A model without its layers, and its layers in their order."""

    model: Any
    layers: list[Any]
    """Each a `Layer`, whose mixers are attributes."""


def prepare_weights(model: Any, stacks: Stacks, weight_format: WeightFormat, call: Call) -> DecoderWeights:
    """Weights from a model without its layers, and from these; to be called with mesh and rules in force."""
    take_layer = jax.jit(partial(_layer, weight_format))
    layers = [call(take_layer, stack, np.int32(place)) for stack, place in stacks]
    return DecoderWeights(call(jax.jit(partial(_outer_weights, weight_format)), model), layers)


def stacks_of(placed: ShardedModel, parameters: Tree) -> tuple[Any, Stacks]:
    """A model with parameters as they are stored, on a mesh without stages: without its layers, and these."""
    model, places = layer_locations(placed.inference_model(parameters))
    return model, iter(places)


def layer_locations(model: Any) -> tuple[Any, list[tuple[Any, int]]]:
    """A model without its layers, and where each of them is, in their order."""
    found = []
    for stack in model.decoder_stacks:
        found += [(number, place, stack.layers) for place, number in enumerate(stack.order.flat) if number != PADDING]
        stack.layers = None
    return model, [(layers, place) for _, place, layers in sorted(found, key=lambda each: each[0])]


def _layer(weight_format: WeightFormat, stack: Layer, number: Array) -> Layer:
    """One layer's own arrays."""
    layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), stack)
    for mixer in (getattr(layer, name) for name in layer.mixers):
        if isinstance(getattr(mixer, "qkv", None), GroupedQKV):
            mixer.qkv = mixer.qkv.assembled()
    return with_matrices(layer, weight_format)


def _outer_weights(weight_format: WeightFormat, model: Any) -> Any:
    """What is not in the layers. In 8 bits, a table that is also that of the lookups has a scale for each row."""
    table = model.output_table[...]
    model = with_matrices(model, lambda matrix, _: matrix.astype(weight_format.dtype))
    if weight_format.int8:
        model.output_table.set_value(to_int8(table, (1,)))
    return model
