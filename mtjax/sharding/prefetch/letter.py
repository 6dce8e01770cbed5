"""A layer of a pattern in a scan with prefetch: its forward and its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

from mtjax.sharding.gradients import add_to_layer, split_accumulators, zeros_like_shards
from mtjax.sharding.param_comm import (
    ShardedParam,
    communicated,
    differentiable_shards,
    index_layer,
    is_wrapped,
    with_shards,
)
from mtjax.sharding.prefetch.loop import PrefetchLoop, Run, VjpWithoutParameters, flattened, partition, stack_of
from mtjax.sharding.trainable import NoGrad

Tree = Any


class LetterLayers(NamedTuple):
    """The layers of one letter of a pattern, as a model passes them."""

    run: Run
    """One layer: (hidden states, its `LayerInputs`) -> (hidden states, state)."""
    saving: Callable[[Run], Run]
    """Wraps such a function so that it saves less for its backward pass."""
    layers: Tree
    """Their parameters, [layers, ...], some of them wrapped."""
    numbers: Array
    """int32 [layers]."""


class Stacks(NamedTuple):
    """The arrays of the layers of one letter, without gradient, [layers, ...] each."""

    shards: list[Array]
    """Of parameters with communication: this rank's shards of those that are gathered, and replicated ones in full."""
    resident: list[Any]
    """Other parameters, perhaps wrapped."""
    numbers: Array


class LetterShards(NamedTuple):
    """Arrays by which layers of one letter are differentiated, or their gradients."""

    prefetched: list[Array]
    """Of parameters with communication, without frozen ones."""
    resident: list[Any]
    """Of other parameters; None for frozen ones."""


class LayerConstants(NamedTuple):
    """Arrays that every layer reads."""

    differentiable: list[Array]
    others: list[Array]


class Pending(NamedTuple):
    """Gradients of a layer that are local to this rank's samples, until the layer below runs."""

    letter: str
    gradients: list[Array]
    index: Any


@dataclass(frozen=True, eq=False)
class Letter:
    """The static description of the layers of one letter; it holds no arrays."""

    loop: PrefetchLoop
    function: ClosedJaxpr
    """Of one layer: hidden states, parameters with communication, others, number -> hidden states, state."""
    result: Any
    """Tree of the function's results."""
    constants: Sequence[tuple[bool, int]]
    """Of each constant of `function`: whether it is differentiable, and its index among these `LayerConstants`."""
    last_matrix: int | None
    """Of the trainable parameters with communication: the matrix that the layer reads last, if there is one."""

    @property
    def uses(self) -> list[int]:
        """Indices of the differentiable constants that the layers read."""
        return [index for is_differentiable, index in self.constants if is_differentiable]

    @property
    def has_state(self) -> bool:
        """Whether a layer returns a state."""
        return jax.tree.unflatten(self.result, [0] * self.result.num_leaves)[1] is not None

    def run(
        self,
        x: Array,
        prefetched: list[Any],
        resident: list[Any],
        number: Array,
        used: list[Array],
        others: list[Array],
    ) -> Any:
        """Runs a layer; `used` are the differentiable constants that it reads. Returns hidden states and its state."""
        # The layer's jaxpr is called with its constants as arguments: `_run`, a custom_vjp, may not close over tracers,
        # and differentiates by those of `used`.
        of_layer = iter(used)
        constants = [next(of_layer) if is_used else others[index] for is_used, index in self.constants]
        function = jaxpr_as_fun(ClosedJaxpr(self.function.jaxpr, constants))
        return jax.tree.unflatten(self.result, function(*jax.tree.leaves((x, prefetched, resident, number))))

    def gather(self, stacks: Stacks, index: Any) -> list[Array]:
        """All-gathers the sharded parameters of the layer at `index` in its stacks."""
        return self.loop.gather(stacks.shards, index)

    def forward(
        self, x: Array, gathered: list[Array], stacks: Stacks, index: Any, shared: LayerConstants, *, saves: bool
    ) -> tuple[Array, Tree, Any]:
        """Runs the layer at `index`.

        Args:
          x: hidden states, [batch, act_seq, embed].
          gathered: its sharded parameters, in full.
          stacks: of its letter.
          index: in the stacks.
          shared: constants.
          saves: whether a backward pass follows.

        Returns:
          Hidden states, the layer's state, and what its backward pass reads: the layer's vjp function without arrays
          that it reads again, as a loop would stack them; None without a backward pass.
        """
        parameters = self.loop.of_layer(gathered, stacks.shards, index)
        resident, number = index_layer(stacks.resident, index), stacks.numbers[index]
        used = [shared.differentiable[i] for i in self.uses]
        if not saves:
            return *self.run(x, parameters, resident, number, used, shared.others), None

        def layer(x: Array, parameters: list[Any], trainable_shards: list[Any], used: list[Array]) -> Any:
            return self.run(x, parameters, with_shards(resident, trainable_shards), number, used, shared.others)

        # Neither the layer number nor `others` has a gradient, nor has `resident` where it is frozen.
        (x, state), vjp = jax.vjp(self.loop.saving(layer), x, parameters, differentiable_shards(resident), used)
        return x, state, VjpWithoutParameters.without(vjp, self._read_again(parameters, resident, shared))

    def backward(
        self,
        vjp: Any,
        cotangents: tuple[Array, Tree],
        gathered: list[Array],
        stacks: Stacks,
        index: Any,
        shared: LayerConstants,
    ) -> tuple[Array, list[Array], list[Any], list[Array]]:
        """Runs the backward pass of the layer at `index`.

        Args:
          vjp: what `forward` saved.
          cotangents: of hidden states and of the layer's state.
          gathered: its sharded parameters, in full; not read where the forward pass saved them.
          stacks: of its letter.
          index: in the stacks.
          shared: constants.

        Returns:
          The gradients of the hidden states; of parameters with communication, not reduced yet; of other parameters;
          and of the differentiable constants that the layer reads.
        """
        if self.loop.saves_gathered:
            # The gathered arrays are among the residuals: these fill their places in `of_layer`, and `regathered`
            # lacks them.
            gathered = [jnp.zeros(()) for like in self.loop.prefetched if isinstance(like, ShardedParam)]
        parameters = self.loop.of_layer(gathered, stacks.shards, index)
        again = self._read_again(parameters, index_layer(stacks.resident, index), shared)
        gradient, parameters, of_resident, constants = vjp.of(again)(cotangents)
        return gradient, self.loop.unreduced(parameters), of_resident, constants

    def earliest(self, gradients: list[Array]) -> list[Array]:
        """Selects, of the unreduced gradients of a layer, that of a matrix which its backward pass computes first."""
        return [] if self.last_matrix is None else [gradients[self.last_matrix]]

    def accumulate(self, sums: LetterShards, resident_grads: list[Any], index: Any) -> LetterShards:
        """Adds the gradients of a layer's parameters without communication to their accumulators."""
        return sums._replace(
            resident=jax.tree.map(lambda total, grad: add_to_layer(total, grad, index), sums.resident, resident_grads)
        )

    def reduce(self, sums: LetterShards, pending: Pending) -> LetterShards:
        """Reduces the gradients of a layer over ranks, into their accumulators."""
        return sums._replace(prefetched=self.loop.reduce_into(sums.prefetched, pending.gradients, pending.index))

    def _read_again(self, parameters: list[Any], resident: list[Any], shared: LayerConstants) -> list[Array]:
        # The order is that of the other pass: `VjpWithoutParameters` knows an array by its place in this list.
        used = [shared.differentiable[i] for i in self.uses]
        return [*self.loop.regathered(parameters), *jax.tree.leaves(resident), *used, *shared.others]


def described(
    x: Array, given: LetterLayers, shared: LayerConstants
) -> tuple[Letter, Stacks, LetterShards, LetterShards]:
    """Describes the layers of a letter.

    Args:
      x: hidden states before a layer, [batch, act_seq, embed].
      given: the layers.
      shared: constants of other letters, to which those of this one are added.

    Returns:
      The description, the arrays of the layers, those by which they are differentiated, and the accumulators of their
      gradients.
    """
    layers, sums = split_accumulators(given.layers)
    leaves, tree = jax.tree.flatten(layers, is_leaf=is_wrapped)
    is_prefetched = [communicated(leaf) is not None for leaf in leaves]
    prefetched, resident = partition(leaves, is_prefetched)
    run = flattened(given.run, tree, is_prefetched)
    loop = PrefetchLoop.of(prefetched, run, given.saving, sums is not None)
    # Layers are read from stacks without gradient: autodiff's transpose of the index would add a stack of zeros for
    # each layer. Gradients are written to their accumulators by `reduce` and `accumulate`.
    shards = [lax.stop_gradient(stack_of(leaf)) for leaf in map(communicated, prefetched) if leaf is not None]
    stacks = Stacks(shards, jax.tree.map(lax.stop_gradient, resident), given.numbers)
    # For the types alone: nothing reads the result of this gather, so it is not in the program.
    example = (loop.of_layer(loop.gather(shards, 0), shards, 0), index_layer(stacks.resident, 0), given.numbers[0])
    function, shapes = jax.make_jaxpr(run, return_shape=True)(x, *example)
    letter = Letter(
        loop,
        function,
        jax.tree.structure(shapes),
        [_index_of_constant(array, shared) for array in function.consts],
        _last_matrix(function, example[0], loop.is_trainable),
    )
    differentiable = LetterShards(jax.tree.leaves(differentiable_shards(prefetched)), differentiable_shards(resident))
    if sums is None:
        return letter, stacks, differentiable, zeros_like_shards(differentiable)
    # Frozen parameters have no accumulator.
    trains = [flag for leaf, flag in zip(leaves, is_prefetched, strict=True) if not isinstance(leaf, NoGrad)]
    of_prefetched, of_resident = partition(sums, trains)
    return (
        letter,
        stacks,
        differentiable,
        LetterShards(of_prefetched, jax.tree.unflatten(jax.tree.structure(differentiable.resident), of_resident)),
    )


def _index_of_constant(array: Any, shared: LayerConstants) -> tuple[bool, int]:
    """Returns the index of a constant among those of its kind, to which it is added if no other layer reads it."""
    # Arrays that are not tracers are the program's own constants, and have no gradient.
    is_differentiable = isinstance(array, Tracer) and jnp.issubdtype(array.dtype, jnp.floating)
    among = shared.differentiable if is_differentiable else shared.others
    # By identity: layers of several letters that close over one array share its index, and so its gradient.
    found = next((index for index, known in enumerate(among) if known is array), None)
    if found is None:
        among.append(array)
    return is_differentiable, len(among) - 1 if found is None else found


def _last_matrix(function: ClosedJaxpr, parameters: list[Any], is_trainable: Sequence[bool]) -> int | None:
    """Returns which of the trainable parameters is the matrix that a layer reads last; None without one.

    Args:
      function: of the layer: hidden states, parameters, others.
      parameters: those with communication.
      is_trainable: whether each of them is.
    """
    # The equations are in the order of the trace, and the backward pass runs them from the last to the first.
    read = {
        var: position for position, eqn in enumerate(function.jaxpr.eqns) for var in eqn.invars if isinstance(var, Var)
    }
    variables = iter(function.jaxpr.invars[1:])
    leaves = [[next(variables) for _ in jax.tree.leaves(parameter)] for parameter in parameters]
    trained = [variables_of for variables_of, flag in zip(leaves, is_trainable, strict=True) if flag]
    last_reads = {
        index: max(read.get(var, -1) for var in variables_of)
        for index, variables_of in enumerate(trained)
        if any(var.aval.ndim > 1 for var in variables_of)
    }
    return max(last_reads, key=lambda index: last_reads[index], default=None)
