"""Layers whose mixers read the same hidden states: a parallel residual stream (GPT-J, GPT-NeoX, Falcon)."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import Array, lax

from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import scaled

State = Any


def run_side_by_side(
    layer: Any, x: Array, context: LayerContext, states: Mapping[str, State] | None
) -> tuple[Array, dict[str, State] | None]:
    """Runs a layer's mixers on the same hidden states, and adds all outputs at once, with one dropout mask.

    Arguments and result are those of `Layer.__call__`.
    """
    outputs, after = [], {}
    normed = [layer.normalize(f"{name}_norm", x) for name in layer.mixers]
    if not hasattr(layer, f"{layer.mixers[-1]}_norm"):
        # XLA: on GPUs, it would sum two arrays before it reduces them over the ranks, where nothing is between
        # them, forward and backward; on CPUs it would not. With barriers the collectives are those of two sublayers
        # everywhere.
        normed = lax.optimization_barrier([normed[0]] * len(layer.mixers))
    for name, of_mixer in zip(layer.mixers, normed, strict=True):
        mixer = getattr(layer, name)
        with jax.named_scope(mixer.scope):
            mixed, state = mixer(of_mixer, context, (states or {}).get(name))
        outputs.append(scaled(mixed, layer.output_scales.get(name, 1.0)))
        if state is not None:
            after[name] = state
    total, *others = lax.optimization_barrier(outputs)
    for output in others:
        total = total + output
    return layer.add(x, total, getattr(layer, layer.mixers[-1]), context), after or None
