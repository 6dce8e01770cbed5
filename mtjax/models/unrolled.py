"""Layers without a loop over them (`unroll_layers`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.models.layer_loop import LayerLoopSettings, MixerStates, RunLayer, loops_of
from mtjax.models.recompute_in_order import gradients_in_turn, run_in_order
from mtjax.models.saved_names import layer_mode
from mtjax.sharding.param_comm import LayerInputs, ShardedParam


@contextmanager
def unrolled_layers(layers: Any) -> Iterator[None]:
    """Marks that layers without a loop, with these parameters, are traced: see `is_unrolled` and `computes_apart`."""
    leaves = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, ShardedParam))
    in_parts = any(isinstance(leaf, ShardedParam) and leaf.split_dim is not None for leaf in leaves)
    token = layer_mode.set("unrolled, in parts" if in_parts else "unrolled")
    try:
        yield
    finally:
        layer_mode.reset(token)


def run_unrolled(
    run: RunLayer, loop_settings: LayerLoopSettings, inputs: LayerInputs, x: Array
) -> tuple[Array, MixerStates]:
    """Runs layers without a loop, so that residuals are not copied into stacks.

    Args:
      run: one layer.
      loop_settings: what each saves for its backward pass.
      inputs: of the layers; the parameters are a list of each one's.
      x: input of the first layer, [batch, act_seq, embed].
    """
    layers, numbers, states = inputs
    each = [jax.tree.map(lambda a, i=i: a[i], states) for i in range(len(layers))]
    loops, after = loops_of(len(layers), loop_settings), []
    # The first layers: those that recompute from their inputs run by `run_in_order`, which orders their backward
    # passes.
    from_input = _saving_input(loop_settings, len(layers))
    with unrolled_layers(layers):
        if from_input:
            variants = [variant for loop in loops for variant in [loop.variant(run)] * loop.times]
            x, after = run_in_order(variants, loops[0].saving, x, layers[:from_input], numbers, each)
        run = gradients_in_turn(run) if loop_settings.gradients_in_turn else run
        runs = [wrapped for loop in loops for wrapped in [loop.wrap(run)] * loop.times]
        for i in range(from_input, len(layers)):
            x, state = runs[i](x, LayerInputs(layers[i], numbers[i], each[i]))
            after.append(state)
    return x, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *after)


def _saving_input(loop_settings: LayerLoopSettings, count: int) -> int:
    """Returns how many of `count` layers save their input only: the first ones."""
    if loop_settings.recompute != "full":
        return 0
    return min(loop_settings.recompute_num_layers, count) if loop_settings.recompute_method == "block" else count
