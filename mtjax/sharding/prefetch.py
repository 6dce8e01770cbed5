"""A loop over the layers of a stack in which what a layer needs, and its gradients, travel while another one computes.

With ZeRO-3 a layer's parameters are gathered during the layer before it, forward and backward, and its gradients are
scattered during the backward pass of the layer below. Of four layers, what is in a column happens at the same time:

                run 0     run 1     run 2     run 3     pull 3    pull 2    pull 1    pull 0
      gather 0  gather 1  gather 2  gather 3            gather 2  gather 1  gather 0  (gather 0)
                                                                  scatter 3 scatter 2 scatter 1 scatter 0

These are as many gathers as if each layer had its own, forward and again backward: the last layer keeps its parameters
between its passes, and what the last iteration gathers nobody reads. With ZeRO-1 and 2, in a step of one microbatch,
the backward pass has what the forward pass gathered. Without ZeRO in such a step, and with ZeRO-2 in others, gradients
alone travel.

So parameters and gradients go from one iteration to the next, in slots of the loop's carry. Backward the loop is
autodiff's, whose carry is the cotangent of the forward one: there the cotangent of a slot is not a gradient, but the
parameters that the next iteration reads, or gradients on their way. `_begin`, `_step` and `_turn` say so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.axes import explicit_axes, spec, varying_like
from mtjax.sharding.param_comm import (
    GatherOnUse,
    NoGrad,
    ReduceGradOnUse,
    accumulate_grads_into,
    add_to_layer,
    differentiable_shards,
    index_layer,
    is_wrapped,
    materialize,
    reduce_gradient,
    seed_cotangents,
    set_layer,
    zeros_like_shards,
)
from mtjax.sharding.stacked_collectives import gather_layer, gather_layers
from mtjax.theory.layout import NOT_SHARDED

Tree = Any
Run = Callable[..., tuple[Array, Tree]]


class _Slots(NamedTuple):
    """Of the loop's carry. Forward: what the next layer runs with, and zeros that nobody reads."""

    parameters: list[Array]
    """Those that are gathered. Backward: what the next iteration runs with; nothing of what the forward pass kept."""
    gradients: list[Array]
    """Backward: of the layer above, summed over this rank's samples alone."""


class _IterationInputs(NamedTuple):
    """What an iteration reads besides its carry."""

    others: list[Any]
    """The layer's parameters of which nothing travels."""
    number: Array
    constants: list[Array]
    parts: list[Array]
    """Of the stack's parameters of which something travels: a rank's parts of those that are gathered, or all."""
    place: Array
    """Of the layer in the stack."""


def can_prefetch(layers: Tree) -> bool:
    """Whether of a stack's layers anything travels, and they are enough for a loop: four, as the last is outside, and
    XLA for CPUs takes shorter ones apart."""
    found = [leaf for leaf in map(_communicated, jax.tree.leaves(layers, is_leaf=is_wrapped)) if leaf is not None]
    is_by_hand = bool(found) and not explicit_axes().issuperset(found[0].reduction.axes)
    return is_by_hand and len(_stack(found[0])) > 3


def gather_upfront(layers: Tree) -> Tree:
    """Parameters of a stack for a loop that does not go ahead: those that are gathered once for both passes are."""
    leaves, tree = jax.tree.flatten(layers, is_leaf=is_wrapped)
    kept = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, GatherOnUse) and leaf.keep_for_backward}
    if kept:
        arrays = gather_layers([lax.stop_gradient(leaf) for leaf in kept.values()])
        for (i, leaf), array in zip(kept.items(), arrays, strict=True):
            leaves[i] = leaf.with_gathered(array)
    return jax.tree.unflatten(tree, leaves)


def scan_with_prefetch(
    run: Run, saving: Callable[[Run], Run], x: Array, layers: Tree, numbers: Array, sums: list[Array] | None
) -> tuple[Array, Tree]:
    """Runs layers one after the other.

    Args:
      run: one layer: (stream, layer, its number, None) -> (stream, state).
      saving: wraps such a function, of any arguments, so that it saves less for its backward pass.
      x: input of the first.
      layers: their parameters, stacked; some are `Gathered`, or `Reduced` over ranks.
      numbers: of the layers.
      sums: what their gradients are added to, in the order of their `differentiable` parameters; zeros when None.

    Returns:
      The output of the last, and each layer's state, stacked.
    """
    leaves, tree = jax.tree.flatten(layers, is_leaf=is_wrapped)
    is_ahead = [_communicated(leaf) is not None for leaf in leaves]
    found, others = _divided(leaves, is_ahead)

    def one(x: Array, parameters: list[Array], others: list[Any], number: Array) -> tuple[Array, Tree]:
        own, rest = iter(parameters), iter(others)
        layer = jax.tree.unflatten(tree, [next(own if ahead else rest) for ahead in is_ahead])
        return run(x, layer, number, None)

    parts = [lax.stop_gradient(_stack(leaf)) for leaf in map(_communicated, found) if leaf is not None]
    fixed, last = jax.tree.map(lax.stop_gradient, others), len(numbers) - 1
    loop = _Loop.of(found, one, saving, sums is not None)
    example = (x, loop.of_layer(loop.gather(parts, 0), parts, 0), index_layer(fixed, 0), numbers[0])
    closed, constants = cast(Any, jax.closure_convert(one, *example))
    loop = replace(loop, run=closed)

    stacks = (jax.tree.leaves(differentiable_shards(found)), jax.tree.leaves(differentiable_shards(others)))
    learnt = [ahead for leaf, ahead in zip(leaves, is_ahead, strict=True) if not isinstance(leaf, NoGrad)]
    totals = zeros_like_shards(stacks) if sums is None else _divided(sums, learnt)

    def turn(carry: Tree, at: tuple[Array, Array]) -> tuple[Tree, Tree]:
        (x, slots, own, rest, shared), (place, number) = carry, at
        layer, rest = accumulate_grads_into(index_layer(fixed, place), rest, place)
        using, shared = _shared(constants, shared)
        (x, slots, own), state = cast(
            Any, _step(loop, x, slots, own, _IterationInputs(layer, number, using, parts, place))
        )
        return (x, slots, own, rest, shared), state

    slots, own = cast(Any, _begin(loop, stacks[0], parts))
    carry, states = lax.scan(turn, (x, slots, own, stacks[1], constants), (jnp.arange(last), numbers[:-1]))
    x, slots, own, rest, shared = carry
    layer, rest = accumulate_grads_into(index_layer(fixed, last), rest, jnp.asarray(last))
    using, _ = _shared(constants, shared)
    x, state = saving(closed)(x, _turn(loop, slots, parts), layer, numbers[-1], *using)
    states = jax.tree.map(lambda before, own: jnp.concatenate([before, own[None]]), states, state)
    return seed_cotangents(totals, x, (own, rest)), states


@dataclass(frozen=True, eq=False)
class _Loop:
    """What iterations do; it holds no arrays."""

    travelling: Sequence[GatherOnUse | ReduceGradOnUse]
    """Of each parameter of which something travels, without its arrays."""
    is_learnt: Sequence[bool]
    run: Run
    """(stream, parameters of which something travels, others, number, constants ...) -> (stream, state)."""
    saving: Callable[[Run], Run]
    adds_up: bool
    """Whether there are gradients of earlier microbatches."""

    @classmethod
    def of(cls, found: Sequence[Any], run: Run, saving: Callable[[Run], Run], adds_up: bool) -> "_Loop":
        """For parameters of a stack of which something travels."""
        travelling = [_without_arrays(leaf) for leaf in map(_communicated, found) if leaf is not None]
        return cls(travelling, [not isinstance(leaf, NoGrad) for leaf in found], run, saving, adds_up)

    @property
    def is_kept(self) -> bool:
        """Whether the backward pass has what the forward pass gathered."""
        return any(isinstance(like, GatherOnUse) and like.keep_for_backward for like in self.travelling)

    def gather(self, parts: list[Array], place: Any) -> list[Array]:
        """The parameters of a layer that are gathered."""
        own = zip(self.travelling, index_layer(parts, place), strict=True)
        wrapped = [replace(like, shard=part) for like, part in own if isinstance(like, GatherOnUse)]
        if not self.is_kept:
            return materialize(cast(Any, wrapped))
        with jax.named_scope("parameters"):
            return [gather_layer(each) for each in wrapped]

    def of_layer(self, gathered: list[Array], parts: list[Array], place: Any) -> list[Array]:
        """The parameters of a layer: those that are gathered, and the others from their stacks."""
        own, before = index_layer(parts, place), iter(gathered)
        pairs = zip(self.travelling, own, strict=True)
        return [next(before) if isinstance(like, GatherOnUse) else array for like, array in pairs]

    def again(self, parameters: list[Array]) -> list[Array]:
        """Those of them that the backward pass gathers, or reads from its stack, again."""
        pairs = zip(self.travelling, parameters, strict=True)
        return [array for like, array in pairs if not (isinstance(like, GatherOnUse) and like.keep_for_backward)]

    def waiting(self, gradients: list[Array]) -> list[Array]:
        """Gradients of a layer's parameters in the type in which they travel, of those that are trained."""
        own = zip(self.travelling, gradients, self.is_learnt, strict=True)
        return [gradient.astype(like.reduction.comm_dtype) for like, gradient, is_learnt in own if is_learnt]

    def added(self, sums: list[Array], gradients: list[Array], place: Any) -> list[Array]:
        """Sums over a stack's layers, with the gradients of a layer that waited: each rank's part of them."""
        learnt = [like for like, is_learnt in zip(self.travelling, self.is_learnt, strict=True) if is_learnt]

        def one(total: Array, gradient: Array, like: GatherOnUse | ReduceGradOnUse) -> Array:
            place_in_layer = spec(*like.names) if isinstance(like, GatherOnUse) else like.spec
            # An all-reduce that is added to what a loop carries XLA moves behind the loop.
            put = set_layer if like.reduction.dim == NOT_SHARDED and not self.adds_up else add_to_layer
            return put(total, reduce_gradient(gradient, place_in_layer, like.reduction), place)

        return [one(*each) for each in zip(sums, gradients, learnt, strict=True)]


# --- what all layers read


def _shared(constants: list[Array], carried: list[Array]) -> tuple[list[Array], list[Array]]:
    """Both unchanged; gradients of what a layer reads are added to what is `carried`, one by one: some have none.

    So the last layer's are worked out before the loop: XLA would put them off, and keep what they come from.
    """
    pairs = [_add_to(lax.stop_gradient(own), total) for own, total in zip(constants, carried, strict=True)]
    return [own for own, _ in pairs], [total for _, total in pairs]


@jax.custom_vjp
def _add_to(own: Array, total: Array) -> tuple[Array, Array]:
    return own, total


def _add_to_forward(own: Array, total: Array) -> tuple[tuple[Array, Array], None]:
    return (own, total), None


def _add_to_backward(_: None, gradients: tuple[Array, Array]) -> tuple[None, Array]:
    own, total = gradients
    return None, total + own


_add_to.defvjp(_add_to_forward, _add_to_backward)


# --- before the first layer


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _begin(loop: _Loop, own: list[Array], parts: list[Array]) -> tuple[_Slots, list[Array]]:
    """Slots with the first layer's parameters, and `own`, the trained ones of the stack, unchanged."""
    gathered = loop.gather(parts, 0)
    nothing = _zeros_like(loop.waiting(loop.of_layer(gathered, parts, 0)))
    return _Slots(gathered, nothing), own


def _begin_forward(loop: _Loop, own: list[Array], parts: list[Array]) -> tuple[Any, None]:
    return _begin(loop, own, parts), None


def _begin_backward(loop: _Loop, _: None, cotangents: tuple[_Slots, list[Array]]) -> tuple[list[Array], None]:
    slots, sums = cotangents
    return loop.added(sums, slots.gradients, 0), None


_begin.defvjp(_begin_forward, _begin_backward)


# --- a layer


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(
    loop: _Loop, x: Array, slots: _Slots, own: list[Array], read: _IterationInputs
) -> tuple[tuple[Array, _Slots, list[Array]], Tree]:
    """Runs a layer, gathers the next; `own` passes unchanged, for the sums that are its cotangents."""
    parameters = loop.of_layer(slots.parameters, read.parts, read.place)
    x, state = loop.run(x, parameters, read.others, read.number, *read.constants)
    return (x, slots._replace(parameters=loop.gather(read.parts, read.place + 1)), own), state


def _step_forward(loop: _Loop, x: Array, slots: _Slots, own: list[Array], read: _IterationInputs) -> tuple[Any, Any]:
    run, parameters = loop.saving(loop.run), loop.of_layer(slots.parameters, read.parts, read.place)
    (x, state), pull = jax.vjp(run, x, parameters, read.others, read.number, *read.constants)
    after = slots._replace(parameters=loop.gather(read.parts, read.place + 1))
    return ((x, after, own), state), (
        _VjpWithoutParameters.without(pull, loop.again(parameters)),
        read.parts,
        read.place,
    )


def _step_backward(loop: _Loop, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    pull, parts, place = kept
    (gradient, slots, sums), of_state = cotangents
    sums = loop.added(sums, slots.gradients, place + 1)
    below = slots.parameters if loop.is_kept else loop.gather(parts, jnp.maximum(place - 1, 0))
    again = loop.again(loop.of_layer(slots.parameters, parts, place))
    gradient, own, others, number, *constants = pull.of(again)((gradient, of_state))
    return gradient, _Slots(below, loop.waiting(own)), sums, _IterationInputs(others, number, constants, None, None)  # pyright: ignore[reportArgumentType]


_step.defvjp(_step_forward, _step_backward)


# --- before the last layer, which is outside the loop


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turn(loop: _Loop, slots: _Slots, parts: list[Array]) -> list[Array]:
    """The last layer's parameters, whose cotangents are gradients: from here on they wait in a slot."""
    return loop.of_layer(slots.parameters, parts, len(parts[0]) - 1)


def _turn_forward(loop: _Loop, slots: _Slots, parts: list[Array]) -> tuple[list[Array], Any]:
    return _turn(loop, slots, parts), (slots.parameters if loop.is_kept else None, parts)


def _turn_backward(loop: _Loop, kept: Any, gradients: list[Array]) -> tuple[_Slots, None]:
    gathered, parts = kept
    below = _zeros_like(gathered) if loop.is_kept else loop.gather(parts, len(parts[0]) - 2)
    return _Slots(below, loop.waiting(gradients)), None


_turn.defvjp(_turn_forward, _turn_backward)


@partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class _VjpWithoutParameters:
    """A pull - what `jax.vjp` returns, a tree of what it needs - without a layer's gathered parameters."""

    kept: list[Any]
    tree: Any
    places: tuple[int | None, ...]
    """Of each of the pull's arrays: which parameter it is; None of those that are kept."""

    @classmethod
    def without(cls, pull: Any, parameters: list[Array]) -> "_VjpWithoutParameters":
        """What is to be kept of a pull."""
        arrays, tree = jax.tree.flatten(pull)
        places = [next((i for i, p in enumerate(parameters) if p is array), None) for array in arrays]
        kept = [array for array, place in zip(arrays, places, strict=True) if place is None]
        return cls(kept, tree, tuple(places))

    def of(self, parameters: list[Array]) -> Any:
        """The pull again, with the parameters gathered anew."""
        kept = iter(self.kept)
        return jax.tree.unflatten(self.tree, [next(kept) if i is None else parameters[i] for i in self.places])


def _communicated(leaf: Any) -> GatherOnUse | ReduceGradOnUse | None:
    """What a parameter is gathered from, or its gradient summed by, if it is."""
    leaf = leaf.parameter if isinstance(leaf, NoGrad) else leaf
    is_sent = isinstance(leaf, GatherOnUse) or (isinstance(leaf, ReduceGradOnUse) and bool(leaf.reduction.axes))
    return leaf if is_sent else None


def _stack(leaf: GatherOnUse | ReduceGradOnUse) -> Array:
    return leaf.shard if isinstance(leaf, GatherOnUse) else leaf.array


def _without_arrays(leaf: GatherOnUse | ReduceGradOnUse) -> GatherOnUse | ReduceGradOnUse:
    return replace(leaf, shard=None) if isinstance(leaf, GatherOnUse) else replace(leaf, array=None, shard=None)


def _zeros_like(arrays: list[Array]) -> list[Array]:
    def zeros(like: Array) -> Array:
        kind = jax.typeof(like)
        return varying_like(jnp.zeros(kind.shape, kind.dtype, out_sharding=kind.sharding.spec), like)

    return [zeros(array) for array in arrays]


def _divided(each: Sequence[Any], is_first: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Those of which it holds, and the others."""
    pairs = list(zip(each, is_first, strict=True))
    return [one for one, first in pairs if first], [one for one, first in pairs if not first]
