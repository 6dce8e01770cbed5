"""Two stacks of one section, dense layers and layers with experts: one after the other, or interleaved."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import (
    Layers,
    Loop,
    Recompute,
    RunLayer,
    States,
    as_it_is,
    loops_of,
    plain_scan,
    scan_accumulating,
)
from mtjax.models.stack import Chunk, Residual, Stack, run_layer
from mtjax.sharding.param_comm import split_accumulators
from mtjax.sharding.stacked_collectives import gather_upfront


@dataclass(frozen=True)
class InterleavedStacks:
    """Two stacks of one section, dense layers and layers with experts: one stack after the other, or interleaved."""

    dense: Stack
    stack: Stack
    is_interleaved: bool
    """Whether each layer of `stack` follows the dense layers before it in the model, instead of all dense layers."""

    def __call__(
        self, x: Residual, context: LayerContext, states: State = None, chunk: Chunk | None = None
    ) -> tuple[Residual, State]:
        """Runs all layers, or a chunk of them, in training; returned states are those of `stack` alone."""
        assert states is None
        if not self.is_interleaved:
            x, _ = self.dense(x, context, chunk=chunk)
            return self.stack(x, context, chunk=chunk)
        sparse, recompute, first, is_padded = self.stack.layer_slice(chunk)
        dense = self.dense.layer_slice(chunk).numbers.reshape(len(sparse), -1)
        # [iterations, dense layers + 1]: each layer with experts follows the dense layers before it.
        numbers, run = jnp.concatenate([dense, sparse[:, None]], 1), partial(run_layer, context, is_padded)
        with jax.named_scope("layers"):
            return scan_interleaved(run, x, (self.dense.layers, self.stack.layers), numbers, recompute, first)

    def scatter_counts(self, counts: Float[Array, " chunk_layers ..."], chunk: Chunk) -> Float[Array, " layers ..."]:
        """See `Stack.scatter_counts`: of `stack` alone."""
        return self.stack.scatter_counts(counts, chunk)


def scan_interleaved(
    run: RunLayer,
    x: Array,
    stacks: Sequence[Layers],
    numbers: Array,
    recompute: Recompute,
    first: Array | None = None,
) -> tuple[Array, States]:
    """Runs layers of several stacks alternately: each iteration runs the next few of every stack, stack after stack.

    Args:
      run: one layer, of any of the stacks.
      x: input of the first layer, [batch, act_seq, embed].
      stacks: their parameters, [layers, ...] each.
      numbers: the layers' numbers in the order in which they run, int32 [iterations, layers of an iteration].
      recompute: what each layer saves for its backward pass.
      first: index of the first iteration, where the stacks hold layers of more; None where they hold just these.

    Returns:
      The output of the last layer, and the state of the last layer of each iteration, stacked.
    """
    iterations, split = len(numbers), [split_accumulators(gather_upfront(layers)) for layers in stacks]
    held = sum(len(jax.tree.leaves(layers)[0]) for layers, _ in split) // numbers.shape[1]
    (loop,) = loops_of(iterations, recompute)
    saved = loop.saved(run)

    def by_iteration(tree: Any) -> Any:
        """[layers, ...] -> [iterations, layers of the stack in one, ...]."""
        return jax.tree.map(lambda a: a.reshape(held, -1, *a.shape[1:]), tree)

    def iteration(x: Array, stacks: Sequence[Layers], numbers: Array, _: None) -> tuple[Array, States]:
        """Runs the next layers of every stack."""
        next_number, state = iter(numbers), None
        for layers in stacks:
            for i in range(len(jax.tree.leaves(layers)[0])):
                x, state = saved(x, jax.tree.map(lambda a, i=i: a[i], layers), next(next_number), None)
        return x, state

    stack: Any = (by_iteration([layers for layers, _ in split]), numbers, None)
    sums = [accumulator for _, accumulators in split for accumulator in accumulators or []]
    if not sums and first is None:
        return plain_scan(iteration, x, stack)
    # `saved` wraps each layer already, so the iteration itself is not wrapped.
    loops = [Loop(as_it_is, iterations, as_it_is)]
    return scan_accumulating(iteration, x, stack, loops, by_iteration(sums) or None, first)
