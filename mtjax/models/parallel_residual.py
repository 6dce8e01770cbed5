"""Layers whose mixers read the same hidden states: a parallel residual stream (GPT-J, GPT-NeoX, Falcon)."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.ops import Linear, scaled


def run_side_by_side(
    layer: Any, x: Array, context: LayerContext, states: Mapping[str, MixerState] | None
) -> tuple[Array, dict[str, MixerState] | None]:
    """Runs a layer's mixers on the same hidden states, and adds all outputs at once, with one dropout mask.

    Arguments and result are those of `Layer.__call__`.
    """
    outputs, after, normed = [], {}, []
    for name in layer.mixers:
        with jax.named_scope(getattr(layer, name).scope):
            normed.append(layer.normalize(f"{name}_norm", x))
    # XLA: on GPUs, it sums two arrays before it reduces them over the ranks, where nothing is between them: the
    # outputs, whose biases are added to the sum, and with one norm the gradients of the inputs. On CPUs it does not.
    # Where something may be between them, barriers make the collectives those of two sublayers everywhere.
    products = last_products(layer) if layer.adds_outputs_at_once else []
    is_joined = layer.adds_outputs_at_once and all(product.rule is None for product in products)
    if not hasattr(layer, f"{layer.mixers[-1]}_norm"):
        normed = [normed[0]] * len(layer.mixers)
        normed = normed if is_joined else lax.optimization_barrier(normed)
    for name, of_mixer in zip(layer.mixers, normed, strict=True):
        mixer = getattr(layer, name)
        with jax.named_scope(mixer.scope):
            mixed, state = mixer(of_mixer, context, (states or {}).get(name))
        outputs.append(scaled(mixed, layer.output_scales.get(name, 1.0)))
        if state is not None:
            after[name] = state
    total, *others = outputs if is_joined else lax.optimization_barrier(outputs)
    for output in others:
        total = total + output
    # XLA: the barrier keeps the biases' gradients, which are equal, two arrays to reduce.
    biases = [product.bias[...] for product in products if product.bias is not None]
    for bias in lax.optimization_barrier(biases):
        total = (total.astype(jnp.float32) + bias).astype(total.dtype)
    last = getattr(layer, layer.mixers[-1])
    with jax.named_scope(last.scope):
        return layer.add(x, total, last, context), after or None


def last_products(layer: Any) -> list[Linear]:
    """Returns the last products of a layer's attention and MLP."""
    return [getattr(getattr(layer, mixer), name) for mixer, name in (("attention", "output"), ("mlp", "down"))]
