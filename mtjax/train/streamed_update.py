"""The update of offloaded states, streamed through the device in a loop over layers.

The loop carries the stacks in the host's memory and overwrites them in place. Reads and writes overlap: arrays are in
pairs of about equal size, of which one is read while the other is written. XLA would read all arrays of a layer, and
then write all of them, so barriers hold back what comes later (docs/notes/memory.md).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from mtjax.config import Config
from mtjax.layout.host_order import exchange_pairs
from mtjax.layout.stages import LayerOrder, Orders, order_of
from mtjax.sharding.axes import PartitionSpec
from mtjax.sharding.host_memory import HOST, is_traced_on_host, on_device
from mtjax.sharding.param_specs import ParamSpec
from mtjax.train.optimizer import make_optimizer
from mtjax.train.rounding import round_master, rows_of
from mtjax.train.step import optimizer_step_count

Tree = Any


def on_adam(function: Callable[[Any], Any], state: Tree) -> Tree:
    """Applies a function to Adam's part of an optimizer's state."""
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    return jax.tree.map(lambda x: function(x) if is_adam(x) else x, state, is_leaf=is_adam)


def adam_of(state: Tree) -> Any:
    """Returns Adam's part of an optimizer's state."""
    found: list[optax.ScaleByAdamState] = []
    on_adam(lambda x: found.append(x) or x, state)
    return found[0]


def without_moments(state: Tree) -> Tree:
    """Returns an optimizer's state with None in place of the moments."""
    return on_adam(lambda a: a._replace(mu=None, nu=None), state)


@dataclass(frozen=True)
class Ranks:
    """Stacks of equal length whose layers are on several ranks, such as pipeline stages, or all on each.

    XLA: a dimension that ranks divide can't be indexed. Divided into one of ranks and one of a rank's layers it can.
    """

    count: int
    """Ranks along the first dimension."""
    layers: int
    """Of a rank."""

    def divided(self, stack: Array) -> Array:
        """Divides the first dimension: [layers of all ranks, ...] -> [ranks, layers, ...]."""
        spec = jax.typeof(stack).sharding.spec
        sharding = PartitionSpec(spec[0], None, *spec[1:])
        return lax.reshape(stack, (self.count, self.layers, *stack.shape[1:]), out_sharding=sharding)

    def joined(self, stack: Array) -> Array:
        """Undoes `divided`."""
        spec = jax.typeof(stack).sharding.spec
        shape = self.count * self.layers, *stack.shape[2:]
        return lax.reshape(stack, shape, out_sharding=PartitionSpec(spec[0], *spec[2:]))

    def layer(self, stack: Array, k: Array) -> Array:
        """Takes a layer of each rank: [ranks, layers, ...] -> [ranks, ...]."""
        return lax.dynamic_index_in_dim(stack, k, axis=1, keepdims=False)

    def with_layer(self, stack: Array, layer: Array, k: Array) -> Array:
        """Overwrites a layer of each rank."""
        return lax.dynamic_update_index_in_dim(stack, layer, k, axis=1)

    def numbers(self, order: LayerOrder | None) -> Array:
        """Returns the numbers of the layers in their stack, [layers, ranks]."""
        rows = rows_of(order)
        flat = jnp.arange(self.count * self.layers) if rows is None else rows
        return flat.reshape(self.count, self.layers).T


def stacks_by_ranks(records: list[ParamSpec], arrays: list[Any]) -> dict[Ranks, list[int]]:
    """Returns the indices of stacked parameters, grouped by the ranks on which their layers are."""
    found: dict[Ranks, list[int]] = defaultdict(list)
    for i, (record, array) in enumerate(zip(records, arrays, strict=True)):
        if record.is_stacked:
            layers = jax.typeof(array).sharding.shard_shape(array.shape)[0]
            found[Ranks(array.shape[0] // layers, layers)].append(i)
    return found


class Update(NamedTuple):
    """What an update depends on besides arrays."""

    config: Config
    records: Tree
    """`ParamSpec` of the trained parameters."""
    orders: Orders
    """Order of layers in stacked parameters."""


@dataclass(frozen=True)
class Streamed:
    """The update of one array, or of a layer on each rank that has some of a stack's."""

    config: Config
    """Without clipping, which needs all gradients."""
    others: Tree
    """The optimizer's state without moments."""
    factor: Array | float
    """Of clipping."""
    finite: Array
    """Whether the step counts."""

    def __call__(
        self, record: ParamSpec, g: Array, p: Array, mu: Array, nu: Array, rows: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Returns the parameter and its moments after the step; `rows` are the numbers of the layers that it stacks, if
        these are some of a stack's."""
        # An optimizer of this parameter alone: without clipping no update depends on another parameter.
        rule: Any = make_optimizer(self.config, [record])
        state = on_adam(lambda a: a._replace(mu=[mu], nu=[nu]), self.others)
        master = p.astype(jnp.float32)
        updates, state = rule.update([g * self.factor], state, [master])
        new: Any = optax.apply_updates([master], updates)
        after, seed = adam_of(state), self.config.training.seed
        rounded = round_master(new[0], record, seed, optimizer_step_count(self.others), rows)
        return jax.tree.map(partial(jnp.where, self.finite), (rounded, after.mu[0], after.nu[0]), (p, mu, nu))

    def whole(self, record: ParamSpec, g: Array, p: Array, mu: Array, nu: Array) -> tuple[Array, ...]:
        """Updates a parameter outside stacks; arguments as of a call, but in any memory, in which the results are."""
        # XLA: without the barrier what the step has read of a parameter at its beginning would be kept for its update.
        g, p = lax.optimization_barrier((g, p))
        new = self(record, g, *on_device((p, mu, nu)))
        return tuple(
            jax.device_put(b, HOST) if is_traced_on_host(a) else b for a, b in zip((p, mu, nu), new, strict=True)
        )

    def counted(self) -> Tree:
        """Returns the optimizer's state after the step, without moments."""
        # Counters alone, which are the same for all layers.
        rule: Any = make_optimizer(self.config, [])
        _, state = rule.update([], on_adam(lambda a: a._replace(mu=[], nu=[]), self.others), [])
        return jax.tree.map(partial(jnp.where, self.finite), without_moments(state), self.others)


def streamed_update(
    how: Update, gradients: Tree, optimizer: Tree, parameters: Tree, finite: Array, norm: Array
) -> tuple[Tree, Tree]:
    """Traces the update; returns the parameters and the optimizer's state, each array in the memory in which it is.

    Args:
      how: the update.
      gradients: in a tree like the trained parameters'.
      optimizer: state.
      parameters: the trained ones.
      finite: whether the step counts.
      norm: of all gradients.
    """
    clip = how.config.optimizer.clip_grad_norm
    # As `train.optimizer` clips, but by a factor that is known before the loops.
    factor = jnp.minimum(1.0, clip / norm) if clip else 1.0
    unclipped = replace(how.config, optimizer=replace(how.config.optimizer, clip_grad_norm=0.0))
    one = Streamed(unclipped, without_moments(optimizer), factor, finite)
    adam, (leaves, structure) = adam_of(optimizer), jax.tree.flatten(parameters)
    every = jax.tree.leaves(how.records)
    arrays = list(zip(*map(jax.tree.leaves, (gradients, parameters, adam.mu, adam.nu)), strict=True))
    new: list[Any] = [None if r.is_stacked else one.whole(r, *each) for r, each in zip(every, arrays, strict=True)]
    for ranks, members in stacks_by_ranks(every, leaves).items():
        loop = _LayerLoop.of(one, ranks, [every[i] for i in members], how.orders, [arrays[i] for i in members])
        for i, result in zip(members, loop.run([arrays[i] for i in members]), strict=True):
            new[i] = result
    updated, mu, nu = (structure.unflatten(column) for column in zip(*new, strict=True))
    return updated, on_adam(lambda a: a._replace(mu=mu, nu=nu), one.counted())


StackArrays = tuple[Array, ...]
"""Gradients, parameters, first and second moments, [ranks, layers, ...] each."""
Layer = list[Array]
"""Arrays of a layer on the device, in the order of a stack: those that are in the host's memory between steps."""


@dataclass(frozen=True)
class _LayerLoop:
    """The update of stacks, on each rank one layer of all of them at a time.

    Of a pair of stacks, the smaller one's layer k has been read before iteration k. That updates it, writes it while
    the larger one is read, updates that, and writes it while layer k + 1 of the smaller one is read.
    """

    one: Streamed
    ranks: Ranks
    records: Sequence[ParamSpec]
    numbers: Sequence[Array]
    """Of the layers of each stack."""
    pairs: Sequence[tuple[int, ...]]
    """Of stacks, the larger one first."""
    hosted: tuple[int, ...]
    """Which arrays of a stack are in the host's memory."""

    @classmethod
    def of(
        cls, one: Streamed, ranks: Ranks, records: Sequence[ParamSpec], orders: Orders, arrays: Sequence[StackArrays]
    ) -> "_LayerLoop":
        """Describes the loop over stacks, or over arrays outside them."""
        numbers = [ranks.numbers(order_of(record.name, orders)) for record in records]
        sizes = [math.prod(jax.typeof(p).sharding.shard_shape(p.shape)) for _, p, *_ in arrays]
        # The same for all stacks: moments, and perhaps parameters.
        hosted = tuple(i for i, a in enumerate(arrays[0]) if is_traced_on_host(a))
        return cls(one, ranks, records, numbers, exchange_pairs(sizes), hosted)

    def run(self, arrays: Sequence[StackArrays]) -> list[StackArrays]:
        """Updates gradients, parameters and moments; returns parameters and moments, each in its memory."""
        stacks = [tuple(map(self.ranks.divided, stack)) for stack in arrays]
        last, first = self.ranks.layers - 1, jnp.asarray(0)
        held = [self._read(stacks[pair[-1]], first) for pair in self.pairs]
        stacks, held = lax.fori_loop(0, last, partial(self._iteration, reads_ahead=True), (stacks, held))
        # The last layer, outside the loop: nothing is left to read ahead.
        stacks, _ = self._iteration(jnp.asarray(last), (stacks, held), reads_ahead=False)
        return [tuple(map(self.ranks.joined, stack[1:])) for stack in stacks]

    def _iteration(
        self, k: Array, carry: tuple[list[StackArrays], list[Layer]], *, reads_ahead: bool
    ) -> tuple[list[StackArrays], list[Layer]]:
        """Updates layer k of all stacks.

        Args:
          k: number of the layer on its rank.
          carry: stacks, and of each pair's smaller one (or only one) what is read already.
          reads_ahead: whether there is a next layer.
        """
        stacks, held = list(carry[0]), list(carry[1])
        for pair_index, pair in enumerate(self.pairs):
            early, late = pair[-1], pair[0] if len(pair) > 1 else None
            leaving = self._update(stacks, early, held[pair_index], k)
            k, arrived = self._exchange(stacks, k, early, leaving, late)
            leaving = [] if late is None else self._update(stacks, late, arrived, k)
            k, held[pair_index] = self._exchange(stacks, k, late, leaving, early if reads_ahead else None, ahead=1)
        return stacks, held

    def _read(self, stack: StackArrays, k: Array) -> Layer:
        """Reads a layer's arrays from the host."""
        return [on_device(self.ranks.layer(stack[i], k)) for i in self.hosted]

    def _update(self, stacks: list[StackArrays], stack_index: int, arrived: Layer, k: Array) -> Layer:
        """Updates a layer of this stack: returns what is to be written to the host, and replaces the rest."""
        stack = list(stacks[stack_index])
        layer = [self.ranks.layer(a, k) if i not in self.hosted else a for i, a in enumerate(stack)]
        for i, array in zip(self.hosted, arrived, strict=True):
            layer[i] = array
        new = self.one(self.records[stack_index], *layer, rows=self.numbers[stack_index][k])
        # What stays on the device. 0 is the gradient, which nothing writes.
        for i in {1, 2, 3}.difference(self.hosted):
            stack[i] = self.ranks.with_layer(stack[i], new[i - 1], k)
        stacks[stack_index] = tuple(stack)
        return [new[i - 1] for i in self.hosted]

    def _exchange(
        self, stacks: list[StackArrays], k: Array, to: int | None, leaving: Layer, source: int | None, ahead: int = 0
    ) -> tuple[Array, Layer]:
        """Writes a layer to the host, and reads one of another stack: array by array, one in each direction at a time.

        Args:
          stacks: in which the written one is replaced.
          k: number of the layer.
          to: the stack that is written, if any.
          leaving: the layer.
          source: the stack that is read, if any.
          ahead: of which layer, less k.

        Returns:
          k, which is known only when all has arrived, and what was read.
        """
        arrived: Layer = []
        for position, i in enumerate(self.hosted):
            written = read = None
            if to is not None:
                written = self.ranks.with_layer(stacks[to][i], jax.device_put(leaving[position], HOST), k)
            if source is not None:
                read = on_device(self.ranks.layer(stacks[source][i], k + ahead))
            # XLA: the next copies depend on k, and so begin when this pair has arrived.
            k, written, read, leaving = lax.optimization_barrier((k, written, read, leaving))
            if to is not None:
                stacks[to] = (*stacks[to][:i], written, *stacks[to][i + 1 :])
            arrived += [] if read is None else [read]
        return k, arrived
