"""Runs the layers of a pattern with prefetch: what `prefetch/scan.py` does, where neighbouring layers differ.

Layer i + 1 is all-gathered while layer i computes, in both passes, and the gradients of layer i + 1 are reduced while
the backward pass of layer i computes, whatever their letters. Repeats are loops (`joined_loops`): the last layer of an
iteration gathers the first of the next, or of the next loop. Each pass gathers every layer once. The backward pass does
not gather the last layer again where the pattern begins with a loop of several iterations; the last iteration of that
loop's backward pass, whose layer has none below, gathers one that is not read.

Parameters of neighbouring layers have different shapes, so the slots of a loop's cotangents, through which layers of
one stack hand on parameters and gradients, can't be used. Forward and backward pass are separate loops in one
`custom_vjp`, and hand them on in their carries.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.config.layer_pattern import LayerRun, joined_loops
from mtjax.sharding.after import after, barrier, is_tensor_parallel
from mtjax.sharding.prefetch.letter import (
    LayerConstants,
    Letter,
    LetterLayers,
    LetterShards,
    Pending,
    Stacks,
    described,
)
from mtjax.sharding.prefetch.loop import zeros_like

Tree = Any


class _LayerOfLetter(NamedTuple):
    """A layer, by its letter and its index among the layers of that letter."""

    letter: str
    index: Any
    """Among the layers of its letter."""


class _Inputs(NamedTuple):
    """Inputs of all layers without gradient, or with one that is returned apart."""

    stacks: Mapping[str, Stacks]
    sums: Mapping[str, LetterShards]
    """Accumulators of the gradients, float32."""
    others: list[Array]
    """Constants without gradient."""


@dataclass(frozen=True, eq=False)
class _Program:
    """The static description of the layers."""

    loops: Sequence[LayerRun]
    letters: Mapping[str, Letter]

    @property
    def last_letter(self) -> str:
        """Letter of the last layer."""
        return self.loops[-1].unit[-1]

    @property
    def saves_last(self) -> bool:
        """Whether the gathered parameters of the last layer are saved for the backward pass: because the first loop's
        backward pass gathers one layer too many, and this one need not be gathered again."""
        return self.loops[0].times > 1 and not self.letters[self.last_letter].loop.saves_gathered

    def before(self, loop_index: int) -> Counter[str]:
        """Returns the layers of each letter before a loop."""
        seen: Counter[str] = Counter()
        for unit, times in self.loops[:loop_index]:
            seen.update({letter: times * unit.count(letter) for letter in set(unit)})
        return seen

    def layers_of_iteration(self, loop_index: int, index: Any) -> list[_LayerOfLetter]:
        """Returns the layers of an iteration."""
        unit = self.loops[loop_index].unit
        before, seen = self.before(loop_index), Counter[str]()
        found = []
        for letter in unit:
            found.append(_LayerOfLetter(letter, before[letter] + unit.count(letter) * index + seen[letter]))
            seen[letter] += 1
        return found

    def below(self, loop_index: int, first: _LayerOfLetter, index: Any) -> _LayerOfLetter | None:
        """Returns the layer before an iteration; None before the first layer."""
        unit, times = self.loops[loop_index]
        # The first loop has a layer below only if it has several iterations: then the last letter of its unit is below
        # all of them but the first (`joined_loops`).
        if times == 1 and loop_index == 0:
            return None
        letter = unit[-1] if times > 1 else self.loops[loop_index - 1].unit[-1]
        before = self.before(loop_index)[letter] + (unit.count(letter) * index if times > 1 else 0)
        # There is none below the first layer. As all iterations are one program, layer 0 of this letter is gathered
        # there, and not read.
        return _LayerOfLetter(letter, jnp.maximum(before - 1, 0) if times > 1 else before - 1)

    def above(self, loop_index: int, index: Any) -> _LayerOfLetter | None:
        """Returns the layer after an iteration; None after the last layer."""
        unit, times = self.loops[loop_index]
        if loop_index == len(self.loops) - 1:
            return None
        letter = unit[0] if times > 1 else self.loops[loop_index + 1].unit[0]
        return _LayerOfLetter(letter, self.before(loop_index)[letter] + unit.count(letter) * (index + 1))


def scan_pattern(letters: str, given: Mapping[str, LetterLayers], x: Array) -> tuple[Array, list[Tree]]:
    """Runs the layers of a pattern, with the communication of one overlapped with the computation of another.

    Args:
      letters: of all layers.
      given: the layers of each letter.
      x: input of the first layer, [batch, act_seq, embed].

    Returns:
      The output of the last layer; and of each loop, the states of the layers of an iteration that have one, stacked,
      [iterations, ...].
    """
    shared = LayerConstants([], [])
    found = {letter: described(x, layers, shared) for letter, layers in given.items()}
    program = _Program(joined_loops(letters), {letter: each[0] for letter, each in found.items()})
    parameters = {letter: each[2] for letter, each in found.items()}
    inputs = _Inputs(
        {k: each[1] for k, each in found.items()}, {k: each[3] for k, each in found.items()}, shared.others
    )
    return cast(Any, _run(program, x, parameters, shared.differentiable, inputs))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    program: _Program, x: Array, parameters: Mapping[str, LetterShards], constants: list[Array], inputs: _Inputs
) -> tuple[Array, list[Tree]]:
    """Runs all layers; `parameters` are what it is differentiated by, `constants` what the layers share."""
    x, states, _, _ = _forward(program, x, LayerConstants(constants, inputs.others), inputs.stacks, saves=False)
    return x, states


def _run_forward(
    program: _Program, x: Array, parameters: Mapping[str, LetterShards], constants: list[Array], inputs: _Inputs
) -> tuple[Any, Any]:
    """Runs all layers; saves what their backward passes read, perhaps with the last one's gathered parameters."""
    shared = LayerConstants(constants, inputs.others)
    x, states, saved, last = _forward(program, x, shared, inputs.stacks, saves=True)
    return (x, states), (saved, last if program.saves_last else [], constants, inputs)


def _forward(
    program: _Program, x: Array, shared: LayerConstants, stacks: Mapping[str, Stacks], *, saves: bool
) -> tuple[Array, list[Tree], list[Any], list[Array]]:
    """Returns the output, the states, what the backward passes read, and the gathered parameters of the last layer."""

    def iteration(loop_index: int, carry: Any, index: Any) -> tuple[Any, Any]:
        """Runs the layers of one repetition of a loop's letters, and gathers the layer that follows each."""
        (x, gathered), states, saved = carry, [], []
        layers = program.layers_of_iteration(loop_index, index)
        following = [*layers[1:], program.above(loop_index, index)]
        for (letter, index_in_stack), above in zip(layers, following, strict=True):
            ahead = gathered
            # The gather depends on the layer's input, and may begin when that is there; the layer does not wait for it.
            if above is not None:
                (x, gathered), next_index = _index_after((x, gathered), above)
                ahead = program.letters[above.letter].gather(stacks[above.letter], next_index)
            x, state, vjp = program.letters[letter].forward(
                x, gathered, stacks[letter], index_in_stack, shared, saves=saves
            )
            states += [] if state is None else [state]
            saved.append(vjp)
            gathered = ahead
        return (x, gathered), (states, saved)

    first = program.loops[0].unit[0]
    carry, found = (x, program.letters[first].gather(stacks[first], 0)), []
    for loop_index, run in enumerate(program.loops):
        if run.times > 1:
            carry, (states, saved) = lax.scan(partial(iteration, loop_index), carry, jnp.arange(run.times))
        else:
            carry, (states, saved) = iteration(loop_index, carry, 0)
            states = jax.tree.map(lambda a: a[None], states)
        found.append((states, saved))
    states, saved = zip(*found, strict=True)
    return carry[0], list(states), list(saved), carry[1]


def _index_after(known: tuple[Array, list[Array]], layer: _LayerOfLetter) -> tuple[tuple[Array, list[Array]], Array]:
    """Returns `known`, which the layer before reads, and the index of a layer that is to be gathered after it."""
    # XLA: without the barrier, it would gather all layers of an iteration at its beginning, and outside loops gather a
    # layer once for both passes, and hold all layers in full. And it would gather two neighbouring layers in one
    # all-gather, if none depended on the other.
    return lax.optimization_barrier((known, jnp.asarray(layer.index)))


class _Passed(NamedTuple):
    """What the backward pass of a layer hands to that of the layer below."""

    gradient: Array
    """Of the hidden states."""
    gathered: list[Array]
    """Sharded parameters of the layer below, in full."""
    waiting: list[Array]
    """The layer's gradients, not reduced yet."""
    sums: Mapping[str, LetterShards]
    of_constants: list[Array]
    """Gradients of the constants."""


def _run_backward(program: _Program, residuals: Any, cotangents: tuple[Array, list[Tree]]) -> tuple[Any, ...]:
    """Runs the backward passes of all layers, from the last to the first; returns the gradients of the hidden states,
    [batch, act_seq, embed], of the layers' parameters, and of the constants."""
    (saved, last, constants, inputs), (gradient, state_cotangents) = residuals, cotangents
    shared, stacks = LayerConstants(constants, inputs.others), inputs.stacks

    def iteration(loop_index: int, carry: _Passed, scanned: Any) -> tuple[_Passed, None]:
        """Runs the backward passes of one repetition of a loop's letters, from the last to the first."""
        index, vjps, states = scanned
        layers, above, states = (
            program.layers_of_iteration(loop_index, index),
            program.above(loop_index, index),
            list(states),
        )
        lower = [program.below(loop_index, layers[0], index), *layers[:-1]]
        for layer, vjp, below in zip(reversed(layers), reversed(vjps), reversed(lower), strict=True):
            # From the end: `states` has one for each layer that returns one, from the first to the last.
            state = states.pop() if program.letters[layer.letter].has_state else None
            carry = _layer_backward(program, carry, (vjp, state), (above, layer, below), shared, stacks)
            above = layer
        return carry, None

    loops = program.loops
    # The last layer has no gradients above it to reduce: `waiting` is empty, and `above` is None.
    carry = _Passed(*_last_gathered(program, gradient, last, stacks), [], inputs.sums, zeros_like(constants))
    for loop_index in reversed(range(len(loops))):
        scanned = (saved[loop_index], state_cotangents[loop_index])
        if loops[loop_index].times > 1:
            # XLA: it would copy the stacks of other loops, too.
            sums = carry.sums
            carry = carry._replace(sums={letter: sums[letter] for letter in dict.fromkeys(loops[loop_index].unit)})
            scanned = (jnp.arange(loops[loop_index].times), *scanned)
            carry, _ = lax.scan(partial(iteration, loop_index), carry, scanned, reverse=True)
            carry = carry._replace(sums={**sums, **carry.sums})
        else:
            carry, _ = iteration(loop_index, carry, (0, scanned[0], jax.tree.map(lambda a: a[0], scanned[1])))
    first = program.loops[0].unit[0]
    # The first layer's gradients: there is no layer below it to reduce them.
    reduced = program.letters[first].reduce(carry.sums[first], Pending(first, carry.waiting, 0))
    return carry.gradient, {**carry.sums, first: reduced}, carry.of_constants, None


def _layer_backward(
    program: _Program,
    given: _Passed,
    saved: tuple[Any, Tree],
    neighbours: tuple[_LayerOfLetter | None, _LayerOfLetter, _LayerOfLetter | None],
    shared: LayerConstants,
    stacks: Mapping[str, Stacks],
) -> _Passed:
    """Runs the backward pass of a layer, overlapped with the communication of its neighbours.

    `given` is from the layer above, `saved` from the forward pass, with the cotangents of the layer's state;
    `neighbours` are the layer above, the layer, and the layer below.
    """
    (gradient, gathered, waiting, sums, of_constants), (above, (letter, index_in_stack), below) = given, neighbours
    description, sums, of_constants = program.letters[letter], dict(sums), list(of_constants)
    if above is not None:
        pending = Pending(above.letter, waiting, above.index)
        sums[above.letter] = program.letters[above.letter].reduce(sums[above.letter], pending)
    reduced, index, under = {} if above is None else {above.letter: sums[above.letter]}, None, []
    if below is not None and not program.letters[below.letter].loop.saves_gathered:
        (gradient, gathered), index = _index_after((gradient, gathered), below)
    vjp, state = saved
    found = description.backward(vjp, (gradient, state), gathered, stacks[letter], index_in_stack, shared)
    gradient, waiting, of_resident, of_shared = found
    if below is not None and index is not None:
        # XLA: one collective runs at a time over these ranks. If the gather were ready when the layer begins, XLA would
        # wait for the reduction first, with nothing computed meanwhile; so the gather also waits for the first matrix's
        # gradient.
        known = [*(array for each in reduced.values() for array in each.prefetched), *description.earliest(waiting)]
        index = after(known, index) if known and is_tensor_parallel() else index
        under = program.letters[below.letter].gather(stacks[below.letter], index)
    # XLA: the end of a layer, as that of an iteration. It would compute gradients of matrices after other layers, and
    # reduce those of two neighbouring layers together.
    gradient, waiting, reduced = barrier((gradient, waiting, reduced))
    sums |= reduced
    sums[letter] = description.accumulate(sums[letter], of_resident, index_in_stack)
    for i, grad in zip(description.uses, of_shared, strict=True):
        of_constants[i] = of_constants[i] + grad
    return _Passed(gradient, under, waiting, sums, of_constants)


def _last_gathered(
    program: _Program, gradient: Array, last: list[Array], stacks: Mapping[str, Stacks]
) -> tuple[Array, list[Array]]:
    """Returns the gradient of the output, and the gathered parameters of the last layer: `last`, if they were saved;
    nothing where its backward pass reads none."""
    letter = program.last_letter
    if program.saves_last or program.letters[letter].loop.saves_gathered:
        return gradient, last
    end = _LayerOfLetter(letter, program.before(len(program.loops))[letter] - 1)
    (gradient, _), index = _index_after((gradient, []), end)
    return gradient, program.letters[letter].gather(stacks[letter], index)


_run.defvjp(_run_forward, _run_backward)
