"""Stacks of layers of several kinds in one section, whose layers run as a pattern says."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int

from mtjax.config.layer_pattern import LayerRun, loops_of_pattern, runs_of
from mtjax.models.layer import Stack, run_layer
from mtjax.models.layer_context import LayerContext, Residual, State
from mtjax.models.layer_loop import LoopOverLayers, can_prefetch, loops_of
from mtjax.models.run_alone import run_alone
from mtjax.models.stack_chunks import Chunk, LayerSlice, layer_slice, run_chunk
from mtjax.sharding.axes import varying_like
from mtjax.sharding.gradients import (
    accumulate_grads_into,
    seed_cotangents,
    split_accumulators,
    zeros_like_shards,
)
from mtjax.sharding.param_comm import LayerInputs, differentiable_shards, index_layer
from mtjax.sharding.zero import gather_upfront

Carry = tuple[Array, Mapping[str, list[Array]]]
"""Hidden states, and each stack, unchanged: its cotangent is the accumulator of its gradients."""


@dataclass(frozen=True)
class PatternStacks:
    """A stack for each letter of a pattern. Repeats are loops, so that few layers are compiled. Where the layers of
    every stack follow one another, each runs as in a model of one stack; else prefetch is that of
    `mtjax.sharding.prefetch.pattern` (`Plan.prefetches`)."""

    stacks: Mapping[str, Stack]
    """By letter."""

    def over_layers(self, context: LayerContext, states: State = None) -> LoopOverLayers:
        """See `Stack.over_layers`; in training, where returned states are those of layers with experts."""
        assert states is None
        return partial(self.run_chunk, context=context, chunk=None)

    def run_chunk(self, x: Residual, context: LayerContext, chunk: Chunk | None) -> tuple[Residual, State]:
        """Runs the layers of a chunk; all of them when None."""
        letters = next(iter(self.stacks.values())).order.pattern
        runs = loops_of_pattern(letters)
        alone = {unit for unit, times in runs if unit in self.stacks and times == letters.count(unit)}
        alone = alone if len(alone) == len(self.stacks) else set()
        mixed = {letter: stack for letter, stack in self.stacks.items() if letter not in alone}
        if mixed and chunk is None and self._can_prefetch:
            return self._run_with_prefetch(letters, x, context)
        loop, done, reports = PatternLoop.of(mixed, context, chunk), dict.fromkeys(mixed, 0), []
        carried = loop.carried
        for run in runs:
            with jax.named_scope("layers"):
                if run.unit in alone:
                    with jax.named_scope((stack := self.stacks[run.unit]).path):
                        x, report = run_chunk(stack, x, context, chunk)
                else:
                    (x, carried), report = loop.run(run, done, (x, carried))
            reports += [] if report is None else [report]
        with jax.named_scope("layers"):
            # After the last loop, where the backward pass begins: it is given the accumulators there.
            x = seed_cotangents(loop.sums, x, carried) if mixed else x
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else None

    @property
    def with_experts(self) -> Stack:
        """The stack of layers with experts, whose counters training reports; any other where there are none."""
        return max(self.stacks.values(), key=lambda stack: "experts" in stack.layers.mixers)

    @property
    def _can_prefetch(self) -> bool:
        """Whether a stack has communication to overlap, and every layer saves the same, each in its turn."""
        stacks = self.stacks.values()
        saves_alike = all(stack.loop_settings.has_one_loop for stack in stacks)
        return saves_alike and any(can_prefetch(split_accumulators(stack.layers)[0], 1) for stack in stacks)

    def _run_with_prefetch(self, letters: str, x: Residual, context: LayerContext) -> tuple[Residual, State]:
        """Runs all layers, in loops over layers of several letters."""
        from mtjax.sharding.prefetch.letter import LetterLayers
        from mtjax.sharding.prefetch.pattern import scan_pattern

        def run(path: str, x: Array, inputs: LayerInputs) -> tuple[Array, State]:
            with jax.named_scope(path):
                return run_layer(context, x, inputs)

        given = {}
        for letter, stack in self.stacks.items():
            of_stack = layer_slice(stack, None)
            # One, as `_can_prefetch` requires that all layers save the same.
            (loop,) = loops_of(len(of_stack.numbers), of_stack.loop_settings)
            given[letter] = LetterLayers(partial(run, stack.path), loop.saving, stack.layers, of_stack.numbers)
        with jax.named_scope("layers"):
            x, states = scan_pattern(letters, given, x)
        reports = [_in_order(each) for each in states if each]
        return x, jax.tree.map(lambda *parts: jnp.concatenate(parts), *reports) if reports else None


@dataclass(frozen=True)
class PatternLoop:
    """What the loops over layers read. Every layer's parameters are taken from its stack by index, and its gradients
    are added to the accumulators there, as in `layer_loop.scan_accumulating`."""

    context: LayerContext
    slices: Mapping[str, LayerSlice]
    fixed: Mapping[str, Any]
    """Parameters of each stack, without gradient."""
    carried: Mapping[str, list[Array]]
    sums: Mapping[str, list[Array]]
    """Accumulators of the gradients of each stack."""
    paths: Mapping[str, str]
    """Names of the stacks, and of the scopes of their layers."""

    @classmethod
    def of(cls, stacks: Mapping[str, Stack], context: LayerContext, chunk: Chunk | None) -> "PatternLoop":
        """Prepares the loops over layers of these stacks."""
        # Without prefetch, what ZeRO-1 and 2 keep for both passes is gathered before the loops.
        split = {letter: split_accumulators(gather_upfront(stack.layers)) for letter, stack in stacks.items()}
        carried = {letter: jax.tree.leaves(differentiable_shards(layers)) for letter, (layers, _) in split.items()}
        sums = {
            letter: zeros_like_shards(carried[letter]) if sums is None else sums for letter, (_, sums) in split.items()
        }
        slices = {letter: layer_slice(stack, chunk) for letter, stack in stacks.items()}
        fixed = {letter: jax.tree.map(lax.stop_gradient, layers) for letter, (layers, _) in split.items()}
        return cls(context, slices, fixed, carried, sums, {letter: stack.path for letter, stack in stacks.items()})

    def run_all(self, letters: str, done: dict[str, int], carry: Carry) -> tuple[Carry, list[State]]:
        """Runs the layers of a pattern.

        Args:
          letters: of the layers.
          done: layers of each letter that ran before; those that run here are added.
          carry: hidden states and stacks.

        Returns:
          The carry, and the states of the layers with experts, of each loop.
        """
        reports = []
        for unit, times in runs_of(letters):
            carry, report = self.run(LayerRun(unit, times), done, carry)
            reports += [] if report is None else [report]
        return carry, reports

    def run(self, run: LayerRun, done: dict[str, int], carry: Carry) -> tuple[Carry, State]:
        """Runs a loop.

        Args:
          run: letters of an iteration, and the number of iterations.
          done: layers of each letter that ran before; those that run here are added.
          carry: hidden states and stacks.

        Returns:
          The carry, and the states of its layers with experts, stacked in their order; None if it has none.
        """

        def iteration(carry: Carry, index: Array) -> tuple[Carry, list[State]]:
            """Runs the layers of one repetition of a loop's letters."""
            (x, carried), seen, states = carry, dict.fromkeys(run.unit, 0), []
            carried = dict(carried)
            for letter in run.unit:
                number_in_letter = before[letter] + run.unit.count(letter) * index + seen[letter]
                x, carried[letter], state = self._layer(letter, x, carried[letter], number_in_letter)
                seen[letter] += 1
                states += [] if state is None else [state]
            return (x, carried), states

        numbers, before = self.slices[run.unit[0]].numbers, dict(done)
        for letter in run.unit:
            done[letter] += run.times
        x, carried = carry
        # XLA: it would copy the stacks of other loops, too.
        used = (x, {letter: carried[letter] for letter in dict.fromkeys(run.unit)})
        (x, used), states = lax.scan(iteration, used, varying_like(jnp.arange(run.times), numbers))
        return (x, {**carried, **used}), _in_order(states) if states else None

    def _layer(
        self, letter: str, x: Array, carried: list[Array], number_in_letter: Int[Array, ""]
    ) -> tuple[Array, list[Array], State]:
        """Runs the layer of index `number_in_letter` among the layers of its letter that run here."""
        of_stack = self.slices[letter]
        index = number_in_letter if of_stack.first is None else of_stack.first + number_in_letter

        def layer(x: Array, carried: list[Array], index: Array, number: Array) -> tuple[Array, list[Array], State]:
            layer, carried = accumulate_grads_into(index_layer(self.fixed[letter], index), carried, index)
            with jax.named_scope(self.paths[letter]):
                x, state = of_stack.run(self.context, x, LayerInputs(layer, number))
            return x, carried, state

        # The layer is indexed inside of what is recomputed, or its parameters would be saved for the backward pass.
        return run_alone(layer, of_stack.loop_settings, x, carried, index, of_stack.numbers[number_in_letter])


def _in_order(states: list[State]) -> State:
    """Stacks the states of a loop, one [iterations, ...] for each layer of an iteration, to [layers, ...] in order."""
    stacked = jax.tree.map(lambda *layers: jnp.stack(layers, 1), *states)
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked)
