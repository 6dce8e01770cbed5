"""Layers of a stack on pipeline stages: chunks of them, and the padding of stages with fewer layers than others."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtjax.layout.stages import PADDING
from mtjax.models.layer import Stack, context_of_layer, run_layer
from mtjax.models.layer_context import LayerContext, Residual, State
from mtjax.models.layer_loop import LayerLoopSettings, loop_over_layers
from mtjax.models.padding_layers import run_unless_padding
from mtjax.sharding.param_comm import LayerInputs, materialize


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of a stack on one pipeline stage."""

    stage: Int[Array, ""]
    number: Int[Array, ""]
    """Index among the stage's chunks."""


class LayerSlice(NamedTuple):
    """Which layers of a stack run one after the other."""

    numbers: Int[Array, " layers"]
    """Numbers of the layers in the model, from which their dropout keys derive; some may be `PADDING`."""
    loop_settings: LayerLoopSettings
    run: Callable[..., tuple[Array, State]] = run_layer
    """Runs one of them; arguments as of `run_layer`."""
    first: Int[Array, ""] | None = None
    """Index of the first in the stack's arrays; None where these hold just these layers."""


def layer_slice(stack: Stack, chunk: Chunk | None) -> LayerSlice:
    """Selects the layers of a chunk; all layers of the stack when None."""
    if chunk is None:
        return LayerSlice(jnp.asarray(stack.order.flat), stack.loop_settings)
    # `order.numbers` is [stages, chunks, layers of a chunk]. On a stage, parameters are stacked chunk by chunk.
    order = stack.order
    # Traced: all stages run one program, and differ in their layers' numbers.
    numbers = jnp.asarray(order.numbers)[chunk.stage, chunk.number]
    first = chunk.number * order.num_slots if len(order.numbers[0]) > 1 else None
    return LayerSlice(numbers, in_chunk(stack.loop_settings), run_padded_layer if order.is_padded else run_layer, first)


def in_chunk(loop_settings: LayerLoopSettings) -> LayerLoopSettings:
    """Returns the policy inside a pipeline chunk: `none` with full recompute, as the schedule recomputes the chunk."""
    return LayerLoopSettings() if loop_settings.kind == "full" else loop_settings


def run_chunk(stack: Stack, x: Residual, context: LayerContext, chunk: Chunk | None) -> tuple[Residual, State]:
    """Runs the layers of a chunk one after the other, as `Stack.over_layers` runs all layers; all of them when None."""
    here = layer_slice(stack, chunk)
    with jax.named_scope("layers"):
        layers = LayerInputs(stack.layers, here.numbers)
        return loop_over_layers(partial(here.run, context), layers, here.loop_settings, here.first)(x)


def scatter_counts(
    stack: Stack, counts: Float[Array, " chunk_layers ..."], chunk: Chunk
) -> Float[Array, " layers ..."]:
    """Moves the counters of a chunk's layers to their positions among all layers of the stack; zeros elsewhere."""
    all_layers = jnp.asarray(sorted(set(stack.order.flat) - {PADDING}))
    numbers = jnp.asarray(stack.order.numbers)[chunk.stage, chunk.number]
    # A comparison, not a scatter: padding must go nowhere, and as an index -1 is the last layer.
    is_same = (all_layers[:, None] == numbers).reshape(-1, len(numbers), *(1,) * (counts.ndim - 1))
    return jnp.where(is_same, counts, 0).sum(1)


def run_padded_layer(context: LayerContext, x: Array, inputs: LayerInputs) -> tuple[Array, State]:
    """Runs a layer as `run_layer` does; returns the hidden states unchanged where its number is `PADDING`."""
    layer, number, state = inputs
    layer_context = context_of_layer(context, number)
    # Materialized in the branch: nothing is gathered for padding.
    return run_unless_padding(lambda x: materialize(layer)(x, layer_context, state), number, x)
