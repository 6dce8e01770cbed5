"""Scans over the layers of a stack with prefetch: parameters are gathered, and gradients reduced, one layer apart.

With ZeRO-3, layer i + 1 is all-gathered while layer i computes, in both passes, and the gradients of layer i + 1 are
reduce-scattered while the backward pass of layer i computes. Of four layers, what is in a column overlaps:

      compute   fwd 0     fwd 1     fwd 2     fwd 3     bwd 3     bwd 2     bwd 1     bwd 0
      gather 0  gather 1  gather 2  gather 3            gather 2  gather 1  gather 0  (gather 0)
                                                                  scatter 3 scatter 2 scatter 1 scatter 0

The number of gathers is that of a loop without prefetch, one per layer and pass: the last layer saves its gathered
parameters from its forward to its backward pass, and the result of the last gather, in brackets, is not read. With
ZeRO-1 and 2, in a step of one microbatch, the backward pass reads what the forward pass gathered. Without ZeRO in such
a step, and with ZeRO-2 in steps of several microbatches, only gradients are overlapped.

A loop iteration hands parameters and gradients to the next one in slots of the loop's carry (`_Slots`). The backward
loop is autodiff's transpose of the forward loop, so its carry is the *cotangent* of the forward carry. In these slots
the cotangent is not a derivative: it holds the gathered parameters of the next backward iteration, and the local
gradients that are not reduced yet. Three `custom_vjp`s write these cotangents, in the order in which the forward pass
calls them:

      _begin  before layer 0: gathers it.             Backward: reduces the gradients of layer 0.
      _step   layers 0 to n - 2, in a `lax.scan`.      Backward of layer i: reduces i + 1, gathers i - 1, runs i.
      _finish before layer n - 1, outside the loop.   Backward: puts the gradients of layer n - 1 into their slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.after import after, is_tensor_parallel
from mtjax.sharding.gradients import accumulate_grads_into, seed_cotangents, zeros_like_shards
from mtjax.sharding.param_comm import LayerInputs, communicated, differentiable_shards, index_layer, is_wrapped
from mtjax.sharding.prefetch.loop import (
    PrefetchLoop,
    Run,
    VjpWithoutParameters,
    flattened,
    partition,
    scan_but_last,
    stack_of,
    traced,
    zeros_like,
)
from mtjax.sharding.trainable import NoGrad

Tree = Any


class _Slots(NamedTuple):
    """The slots of the loop's carry that hand parameters and gradients from one iteration to the next."""

    parameters: list[Array]
    """Forward: the gathered parameters of the next layer. Backward (as a cotangent): those of the next layer down, or
    zeros where the forward pass saved what it gathered."""
    gradients: list[Array]
    """Forward: zeros that nothing reads. Backward: the gradients of the layer above, local to this rank's samples and
    not reduced yet."""


class _IterationInputs(NamedTuple):
    """The inputs of an iteration other than its carry."""

    resident: list[Any]
    """The layer's parameters without communication."""
    number: Array
    constants: list[Array]
    shards: list[Array]
    """The stacked parameters with communication, [layers, ...]: this rank's shards of those that are gathered, and
    replicated ones in full."""
    layer_index: Array
    """Of the layer in the stack."""


def scan_with_prefetch(
    run: Run,
    saving: Callable[[Run], Run],
    variants: Sequence[tuple[Callable[[Run], Run], int]],
    inputs: LayerInputs,
    sums: list[Array] | None,
    x: Array,
) -> tuple[Array, Tree]:
    """Runs layers one after the other, with the communication of one overlapped with the computation of another.

    Args:
      run: one layer: (hidden states, its inputs) -> (hidden states, state).
      saving: wraps such a function, of any arguments, so that it saves less for its backward pass.
      variants: what wraps `run` in a loop of its own over the next layers, and how many; most models have one.
      inputs: of the layers, [layers, ...], without states; some parameters are `ShardedParam`, or `ReplicatedParam`
        over ranks.
      sums: accumulators of their gradients, in the order of their `differentiable_shards`; zeros when None.
      x: input of the first layer, [batch, act_seq, embed].

    Returns:
      The output of the last layer, and each layer's state, [layers, ...].
    """
    numbers = inputs.number
    leaves, tree = jax.tree.flatten(inputs.parameters, is_leaf=is_wrapped)
    is_prefetched = [communicated(leaf) is not None for leaf in leaves]
    prefetched, resident = partition(leaves, is_prefetched)
    run_flat = flattened(run, tree, is_prefetched)
    shards = [lax.stop_gradient(stack_of(leaf)) for leaf in map(communicated, prefetched) if leaf is not None]
    fixed, last = jax.tree.map(lax.stop_gradient, resident), len(numbers) - 1
    loop = PrefetchLoop.of(prefetched, run_flat, saving, sums is not None)
    # For the types alone: nothing reads the result of this gather, so it is not in the program.
    example = (x, loop.of_layer(loop.gather(shards, 0), shards, 0), index_layer(fixed, 0), numbers[0])
    runs, constants, parts = traced(run_flat, variants, example)
    loops = [replace(loop, run=closed) for closed in runs]

    # Loops carry the differentiable stacks unchanged: their cotangents are the accumulators, `sums` (`seed_cotangents`)
    # at the end of the forward pass, the result at its beginning.
    stacks = (jax.tree.leaves(differentiable_shards(prefetched)), jax.tree.leaves(differentiable_shards(resident)))
    is_trainable = [flag for leaf, flag in zip(leaves, is_prefetched, strict=True) if not isinstance(leaf, NoGrad)]
    accumulators = zeros_like_shards(stacks) if sums is None else partition(sums, is_trainable)

    def iteration(variant: int, carry: Tree, scanned: tuple[Array, Array]) -> tuple[Tree, Tree]:
        """Runs the layer at `index` and gathers the next; carries its parameters, the stacks and the constants."""
        (x, slots, stack, resident_stack, shared), (index, number) = carry, scanned
        layer, resident_stack = accumulate_grads_into(index_layer(fixed, index), resident_stack, index)
        using, accumulating = _shared(constants[variant], shared[variant])
        (x, slots, stack), state = cast(
            Any, _step(loops[variant], x, slots, stack, _IterationInputs(layer, number, using, shards, index))
        )
        return (x, slots, stack, resident_stack, [*shared[:variant], accumulating, *shared[variant + 1 :]]), state

    slots, stack = cast(Any, _begin(loop, stacks[0], shards))
    carry, states = scan_but_last(iteration, (x, slots, stack, stacks[1], constants), parts, numbers)
    (x, slots, stack, resident_stack, shared), variant = carry, parts[-1][0]
    # The last layer, outside the loop, saves its gathered parameters: the backward pass begins without a gather.
    layer, resident_stack = accumulate_grads_into(index_layer(fixed, last), resident_stack, jnp.asarray(last))
    using, _ = _shared(constants[variant], shared[variant])
    x, state = saving(loops[variant].run)(x, _finish(loop, slots, shards), layer, numbers[-1], *using)
    states = jax.tree.map(lambda final, *before: jnp.concatenate([*before, final[None]]), state, *states)
    return seed_cotangents(accumulators, x, (stack, resident_stack)), states


# --- constants of the loop: arrays that every layer reads


def _shared(constants: list[Array], carried: list[Array]) -> tuple[list[Array], list[Array]]:
    """Returns both unchanged; the gradients of `constants`, which every layer reads, are added to the cotangents of the
    same arrays in the loop's carry."""
    # One by one, because some have no gradient.
    # XLA: without an accumulator in the carry, the last layer's gradients of these arrays are computed after the
    # backward loop, and all that they are computed from stays alive until then.
    pairs = [_add_to(lax.stop_gradient(array), carry) for array, carry in zip(constants, carried, strict=True)]
    return [array for array, _ in pairs], [carry for _, carry in pairs]


@jax.custom_vjp
def _add_to(array: Array, carried: Array) -> tuple[Array, Array]:
    """Returns both unchanged; the gradient of `array` is added to the cotangent of `carried`."""
    return array, carried


def _add_to_forward(array: Array, carried: Array) -> tuple[tuple[Array, Array], None]:
    return (array, carried), None


def _add_to_backward(_: None, gradients: tuple[Array, Array]) -> tuple[None, Array]:
    """Adds the gradient of `array` to the accumulator, in its shape; `array` itself gets none."""
    gradient, accumulator = gradients
    # The carried copy is read by no layer: its cotangent is an accumulator.
    return None, accumulator + gradient


_add_to.defvjp(_add_to_forward, _add_to_backward)


# --- before the first layer


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _begin(loop: PrefetchLoop, stack: list[Array], shards: list[Array]) -> tuple[_Slots, list[Array]]:
    """Gathers the first layer; returns slots with its parameters, and `stack` unchanged, [layers, ...] of the trainable
    prefetched parameters, for the sake of its cotangents."""
    gathered = loop.gather(shards, 0)
    # A cotangent has the type of its primal, so the forward pass has zeros in the types of the gradients that the
    # backward pass will put there.
    zeros = zeros_like(loop.unreduced(loop.of_layer(gathered, shards, 0)))
    return _Slots(gathered, zeros), stack


def _begin_forward(loop: PrefetchLoop, stack: list[Array], shards: list[Array]) -> tuple[Any, None]:
    return _begin(loop, stack, shards), None


def _begin_backward(loop: PrefetchLoop, _: None, cotangents: tuple[_Slots, list[Array]]) -> tuple[list[Array], None]:
    """Reduces the gradients of the first layer: the last that are still in a slot."""
    slots, accumulators = cotangents
    return loop.reduce_into(accumulators, slots.gradients, 0), None


_begin.defvjp(_begin_forward, _begin_backward)


# --- one layer


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(
    loop: PrefetchLoop, x: Array, slots: _Slots, stack: list[Array], inputs: _IterationInputs
) -> tuple[tuple[Array, _Slots, list[Array]], Tree]:
    """Runs layer i, and gathers layer i + 1.

    Args:
      loop: its description.
      x: hidden states, [batch, act_seq, embed].
      slots: with the gathered parameters of layer i.
      stack: trainable prefetched parameters, [layers, ...]; returned unchanged: their cotangents are the accumulators.
      inputs: the other inputs; `inputs.layer_index` is i.

    Returns:
      (hidden states, slots with the parameters of layer i + 1, `stack`), and the layer's state.
    """
    parameters = loop.of_layer(slots.parameters, inputs.shards, inputs.layer_index)
    x, state = loop.run(x, parameters, inputs.resident, inputs.number, *inputs.constants)
    # The loop ends at the last layer but one, so there is always a next one.
    return (x, slots._replace(parameters=loop.gather(inputs.shards, inputs.layer_index + 1)), stack), state


def _step_forward(
    loop: PrefetchLoop, x: Array, slots: _Slots, stack: list[Array], inputs: _IterationInputs
) -> tuple[Any, Any]:
    """Does what `_step` does; the residuals are the layer's vjp function without its gathered parameters.

    The parameters are left out because `lax.scan` stacks residuals: all layers would be held in full at once.
    """
    run, parameters = loop.saving(loop.run), loop.of_layer(slots.parameters, inputs.shards, inputs.layer_index)
    (x, state), vjp = jax.vjp(run, x, parameters, inputs.resident, inputs.number, *inputs.constants)
    filled = slots._replace(parameters=loop.gather(inputs.shards, inputs.layer_index + 1))
    return ((x, filled, stack), state), (
        VjpWithoutParameters.without(vjp, loop.regathered(parameters)),
        inputs.shards,
        inputs.layer_index,
    )


def _step_backward(loop: PrefetchLoop, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Runs the backward pass of layer i, overlapped with the communication of its neighbours.

    Args:
      loop: its description.
      residuals: (`VjpWithoutParameters` of the layer, shards [layers, ...], i).
      cotangents: of (hidden states [batch, act_seq, embed], slots, stack) and of the layer's state. In `slots`,
        `parameters` are the gathered parameters of layer i, which the iteration before put there, and `gradients` the
        local gradients of layer i + 1; the cotangents of `stack` are the gradient accumulators.

    Returns:
      The cotangents of `_step`'s arguments: the gradient of the hidden states; slots with the parameters of layer i - 1
      and the local gradients of layer i; the accumulators with the gradients of layer i + 1; and the gradients of
      `_IterationInputs`, none for `shards` and `layer_index`.
    """
    vjp, shards, index = residuals
    (gradient, slots, accumulators), state_cotangent = cotangents
    # XLA: neither of these two collectives depends on this layer's backward pass, so both can overlap with it.
    accumulators = loop.reduce_into(accumulators, slots.gradients, index + 1)
    # XLA: sends one at a time over the ranks of data. Beside tensor parallel collectives it would begin with the
    # gather, and wait for it before it sends gradients; without them it hides both, and this order would wait.
    next_index = jnp.maximum((after(accumulators, index) if is_tensor_parallel() else index) - 1, 0)
    # There is none below layer 0. As all iterations are one program, layer 0 is gathered once more there, and not read.
    below = slots.parameters if loop.saves_gathered else loop.gather(shards, next_index)
    regathered = loop.regathered(loop.of_layer(slots.parameters, shards, index))
    gradient, gradients, resident, number, *constants = vjp.of(regathered)((gradient, state_cotangent))
    # None for `shards` and `layer_index`: the gradients of the shards are in `accumulators`.
    inputs = _IterationInputs(resident, number, constants, None, None)  # pyright: ignore[reportArgumentType]
    return gradient, _Slots(below, loop.unreduced(gradients)), accumulators, inputs


_step.defvjp(_step_forward, _step_backward)


# --- before the last layer, which is outside the loop


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish(loop: PrefetchLoop, slots: _Slots, shards: list[Array]) -> list[Array]:
    """Returns the prefetched parameters of the last layer."""
    return loop.of_layer(slots.parameters, shards, len(shards[0]) - 1)


def _finish_forward(loop: PrefetchLoop, slots: _Slots, shards: list[Array]) -> tuple[list[Array], Any]:
    # The gathered parameters are saved for their types alone: `_finish_backward` makes zeros like them.
    return _finish(loop, slots, shards), (slots.parameters if loop.saves_gathered else None, shards)


def _finish_backward(loop: PrefetchLoop, residuals: Any, gradients: list[Array]) -> tuple[_Slots, None]:
    """Begins the backward pass: puts the last layer's local gradients, and the parameters below it, into slots."""
    gathered, shards = residuals
    below = zeros_like(gathered) if loop.saves_gathered else loop.gather(shards, len(shards[0]) - 2)
    # These wait for layer n - 2's backward pass, which reduces them while it computes.
    return _Slots(below, loop.unreduced(gradients)), None


_finish.defvjp(_finish_forward, _finish_backward)
