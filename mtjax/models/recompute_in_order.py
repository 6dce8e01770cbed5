"""Full recompute of layers without a loop: one layer after the other, when gradients of the layers above are known.

Without a loop XLA orders the operations of a step. With `jax.checkpoint` alone it computes gradients of matrices late,
after the recompute of other layers, and holds the activations of several layers for them. Here a recomputed layer
depends on the gradient of its output, and on the reduced gradients of the matrices two layers above, which leaves a
layer's time to reduce them.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard

from mtjax.sharding.after import after, first, of_ranks
from mtjax.sharding.axes import PartitionSpec, non_manual_axes, varying_like
from mtjax.sharding.param_comm import LayerInputs, materialize

Tree = Any
RunLayer = Callable[..., tuple[Array, Tree]]


class OrderTokens(NamedTuple):
    """Arrays, a number of each rank, that layers pass on unchanged. Their cotangents are not derivatives, but order
    what is computed: each depends on the gradients of a layer."""

    above: Array
    """Of the layer above."""
    next_above: Array
    """Of the layer above that one."""


def run_in_order(
    runs: Sequence[RunLayer],
    saving: Callable[[RunLayer], RunLayer],
    x: Array,
    layers: Sequence[Any],
    numbers: Array,
    states: Sequence[Any],
) -> tuple[Array, list[Tree]]:
    """Runs layers one after the other; each saves its input, and the backward pass recomputes one at a time.

    Args:
      runs: of each layer: (hidden states, `LayerInputs`) -> (hidden states, state).
      saving: wraps such a function so that it saves its inputs only.
      x: input of the first layer, [batch, act_seq, embed].
      layers: parameters of each.
      numbers: int32 [layers] or longer.
      states: of each layer.

    Returns:
      The output of the last layer, and each layer's state.
    """
    # A custom_vjp may not close over tracers such as attention's mask: those of `runs` become arguments.
    example = LayerInputs(layers[0], numbers[0], states[0])
    # Equal layers are traced once.
    closed = {run: jax.closure_convert(run, x, example) for run in dict.fromkeys(runs)}
    saved = {run: (saving(function), constants) for run, (function, constants) in closed.items()}
    after, tokens = [], OrderTokens(_no_token(x), _no_token(x))
    for i, layer in enumerate(layers):
        function, constants = saved[runs[i]]
        x, tokens, state = cast(Any, _run(function, x, tokens, (LayerInputs(layer, numbers[i], states[i]), *constants)))
        after.append(state)
    return x, after


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(run: RunLayer, x: Array, tokens: OrderTokens, inputs: tuple[Any, ...]) -> tuple[Array, OrderTokens, Tree]:
    """Returns hidden states, `tokens` and the layer's state."""
    x, state = run(x, *inputs)
    return x, tokens, state


def _run_forward(run: RunLayer, x: Array, tokens: OrderTokens, inputs: tuple[Any, ...]) -> tuple[Any, Any]:
    return _run(run, x, tokens, inputs), (x, inputs)


def _run_backward(run: RunLayer, saved: Any, cotangents: tuple[Array, OrderTokens, Tree]) -> tuple[Any, ...]:
    """Recomputes the layer from its input, [batch, act_seq, embed]; returns the gradients of its inputs, and tokens."""
    (x, inputs), (gradient, tokens, state) = saved, cotangents
    # The recompute waits for its gradient, and for the reduced gradients two layers above: with those of one layer
    # above it would wait for their reduction.
    _, vjp = jax.vjp(run, after((gradient, tokens.next_above), x), *inputs)
    gradient, *others = vjp((gradient, state))
    return gradient, OrderTokens(_token_of(others, tokens.above), tokens.above), tuple(others)


_run.defvjp(_run_forward, _run_backward)


def gradients_in_turn(run: RunLayer) -> RunLayer:
    """Wraps a layer so that the gradient of its input is not used before all of its gradients are computed."""
    # XLA: it would compute many of them after the backward pass of all layers, and hold for each what it is computed
    # from.

    def in_turn(x: Array, inputs: LayerInputs) -> tuple[Array, Tree]:
        x, layer = _in_turn(x, materialize(inputs.parameters))
        return run(x, inputs._replace(parameters=layer))

    return in_turn


@jax.custom_vjp
def _in_turn(x: Array, layer: Any) -> tuple[Array, Any]:
    """Returns a layer's input, and its parameters as products read them: their gradients are not yet reduced."""
    return x, layer


def _in_turn_forward(x: Array, layer: Any) -> tuple[tuple[Array, Any], None]:
    return (x, layer), None


def _in_turn_backward(_: None, gradients: tuple[Array, Any]) -> tuple[Array, Any]:
    x, layer = gradients
    return after((_token(jax.tree.leaves(layer), x),), x), layer


_in_turn.defvjp(_in_turn_forward, _in_turn_backward)


def _no_token(x: Array) -> Array:
    """Returns zeros of the type of a token."""
    count = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in non_manual_axes())
    # A number for each rank along explicit axes: one for all of them would need a reduction.
    zeros = jnp.zeros((count,), jnp.float32)
    return varying_like(reshard(zeros, _over_ranks()) if non_manual_axes() else zeros, x)


def _over_ranks() -> PartitionSpec:
    """Returns the sharding of an array of a number per rank along explicit axes."""
    return PartitionSpec(tuple(sorted(non_manual_axes())))


def _token_of(gradients: Tree, like: Array) -> Array:
    """Returns a token of the gradients of a layer's matrices, with the type of `like`."""
    arrays = [a for a in jax.tree.leaves(gradients) if jnp.issubdtype(a.dtype, jnp.floating)]
    # Those of vectors and routers may be reduced together, after the last layer. Of experts the size of one matrix
    # counts, or other matrices would seem to be as small beside that of many experts.
    largest = max((math.prod(sorted(a.shape)[-2:]) for a in arrays), default=0)
    return _token([a for a in arrays if a.size > largest // 16], like)


def _token(arrays: Sequence[Array], like: Array) -> Array:
    """Returns a token of these arrays, which varies over the mesh axes over which `like` does."""
    return varying_like(of_ranks(lambda *each: jnp.reshape(sum(map(first, each)), 1), _over_ranks(), *arrays), like)
