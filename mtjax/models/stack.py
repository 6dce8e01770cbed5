"""Stacks of layers: parameters along `layers`, and one program for all of them."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model, Parallel
from mtjax.models.layer import Layer
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import Recompute, scan_interleaved, scan_layers
from mtjax.sharding.axes import cond_by_stage, num_shards, spec, varying_like
from mtjax.sharding.param_comm import materialize
from mtjax.theory.stages import PADDING, layer_order

Residual = Float[Array, "batch act_seq embed"]
"""The residual stream."""


@dataclass(frozen=True)
class Chunk:
    """Layers of a stack that follow each other on a stage of a pipeline."""

    stage: Int[Array, ""]
    number: Int[Array, ""]
    """Among the stage's chunks."""


class LayerSlice(NamedTuple):
    """Layers of a stack that are run one after the other: as `run_layers` takes them."""

    numbers: Int[Array, " layers"]
    recompute: Recompute
    first: Int[Array, ""] | None = None
    is_padded: bool = False


class Stack(nnx.Module):
    """Layers of one kind, whose parameters are stacked along `layers`, in the order of `layer_order`."""

    def __init__(
        self,
        model: Model,
        dtype: jax.typing.DTypeLike,
        *,
        kind: str,
        recompute: Recompute,
        parallel: Parallel,
        key: Array,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Draws the parameters.

        Args:
          model: sizes.
          dtype: of the products.
          kind: in `KINDS`.
          recompute: what each layer saves for its backward pass.
          parallel: which layers each stage has.
          key: of all layers of the model, which have one each.
          layers: their numbers, where the model has other stacks too; all `num_layers` when None.
        """
        own = tuple(layers or range(model.num_layers))
        self.order = layer_order(model.num_layers, num_shards("layers"), parallel.chunks, parallel.layers_per_stage).of(
            own
        )
        keys = jax.random.split(key, model.num_layers)
        numbers = np.asarray(self.order.flat)
        if not self.order.is_plain or len(own) < model.num_layers:
            keys = keys[np.maximum(numbers, 0)]

        def layer(key: Array, number: Array) -> Layer:
            drawn = Layer(model, dtype, kind=kind, key=key)
            # Where a stage has no layer, zeros: they stay zeros, and count for nothing in a fingerprint.
            return jax.tree.map(lambda a: jnp.where(number == PADDING, 0, a), drawn) if self.order.is_padded else drawn

        drawn_from = (keys, jnp.asarray(numbers))
        if num_shards("layers") > 1:
            drawn_from = jax.tree.map(lambda a: reshard(a, spec("layers")), drawn_from)
        self.layers = jax.vmap(layer)(*drawn_from)
        self.recompute = recompute

    def __call__(
        self, x: Residual, context: LayerContext, states: State = None, chunk: Chunk | None = None
    ) -> tuple[Residual, State]:
        """Runs all layers, or a chunk of them; states, stacked along `layers`, go in and out as in `run_layers`."""
        numbers, recompute, first, is_padded = self.layer_slice(chunk)
        return run_layers(self.layers, numbers, x, context, recompute, states, first, is_padded)

    def layer_slice(self, chunk: Chunk | None) -> LayerSlice:
        """All layers, or those of a chunk."""
        if chunk is None:
            return LayerSlice(jnp.asarray(self.order.flat), self.recompute)
        numbers = jnp.asarray(self.order.numbers)[chunk.stage, chunk.number]
        first = chunk.number * self.order.places if len(self.order.numbers[0]) > 1 else None
        return LayerSlice(numbers, self.recompute.in_chunk, first, self.order.is_padded)

    def scatter_counts(self, counts: Float[Array, " places ..."], chunk: Chunk) -> Float[Array, " layers ..."]:
        """What is counted of each layer of a chunk, where those of all layers of the stack would stand, in their own
        order; zeros for the others."""
        all_layers = jnp.asarray(sorted(set(self.order.flat) - {PADDING}))
        numbers = jnp.asarray(self.order.numbers)[chunk.stage, chunk.number]
        is_own = (all_layers[:, None] == numbers).reshape(-1, len(numbers), *(1,) * (counts.ndim - 1))
        return jnp.where(is_own, counts, 0).sum(1)


@dataclass(frozen=True)
class InterleavedStacks:
    """Two stacks of one section: the layers of one behind those of the other, or in turns."""

    others: Stack
    stack: Stack
    is_interleaved: bool
    """Whether each layer of the stack comes behind all of the others' with numbers between its own."""

    def __call__(
        self, x: Residual, context: LayerContext, states: State = None, chunk: Chunk | None = None
    ) -> tuple[Residual, State]:
        """Runs all layers, or a chunk of them, in training; states come out of the stack alone."""
        assert states is None
        if not self.is_interleaved:
            x, _ = self.others(x, context, chunk=chunk)
            return self.stack(x, context, chunk=chunk)
        own, recompute, first, is_padded = self.stack.layer_slice(chunk)
        between = self.others.layer_slice(chunk).numbers.reshape(len(own), -1)
        numbers, run = jnp.concatenate([between, own[:, None]], 1), partial(_run_slot, context, is_padded)
        with jax.named_scope("layers"):
            return scan_interleaved(run, x, (self.others.layers, self.stack.layers), numbers, recompute, first)

    def scatter_counts(self, counts: Float[Array, " places ..."], chunk: Chunk) -> Float[Array, " layers ..."]:
        """See `Stack.among_all`: of the stack alone."""
        return self.stack.scatter_counts(counts, chunk)


def run_layers(
    layers: Layer,
    numbers: Int[Array, " layers"],
    x: Residual,
    context: LayerContext,
    recompute: Recompute,
    states: State = None,
    first: Int[Array, ""] | None = None,
    is_padded: bool = False,
) -> tuple[Residual, State]:
    """Runs some layers of a stack, one after the other.

    Args:
      layers: their parameters, stacked.
      numbers: the layers' numbers in the model; a layer derives its dropout keys from the context's and its own.
      x: the residual stream.
      context: what every layer reads besides it.
      recompute: what each layer saves for its backward pass.
      states: the layers' states, each array stacked along `layers`; None in training.
      first: where in `layers` the parameters of the first are; they are exactly these layers' when None.
      is_padded: whether some numbers may be `PADDING`; the stream passes such layers unchanged.

    Returns:
      The residual stream, and the layers' new states, stacked likewise; None where no layer has any.
    """

    run = partial(_run_slot, context, is_padded)
    with jax.named_scope("layers"):
        return scan_layers(run, x, layers, numbers, recompute, states, first)


def _run_slot(
    context: LayerContext, is_padded: bool, x: Array, layer: Layer, number: Array, state: State
) -> tuple[Array, State]:
    """One layer, with dropout keys of its own; or what passes a place without one."""
    keys = context.dropout_keys
    own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)

    def one(x: Array) -> tuple[Array, State]:
        return materialize(layer)(x, dataclasses.replace(context, dropout_keys=own), state)

    if not is_padded:
        return one(x)
    return cond_by_stage(number == PADDING, lambda x: (x, _nothing(one, x)), one, x)


def _nothing(run: Callable[[Array], tuple[Array, State]], x: Array) -> State:
    """Zeros like the state that a layer would have put out."""

    def zeros(like: jax.ShapeDtypeStruct) -> Array:
        return varying_like(jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding.spec), x)

    return jax.tree.map(zeros, jax.eval_shape(run, x)[1])
