"""Adam's moments, and master weights, in the host's pinned memory, streamed through the update on the device.

A loop over layers carries the stacks in the host's memory: it copies one layer's arrays to the device, updates them
there, and writes them back in place. Of other forms XLA starts all copies before the first update, or keeps a second
copy of the stacks (docs/notes/memory.md). With pipeline stages each stage's loop is over its own layers.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding

from mtjax.config import Config
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.layout.stages import LayerOrder, Orders, order_of
from mtjax.models.sharded_model import Batch
from mtjax.runtime.train_state import State
from mtjax.sharding.axes import joined_spec
from mtjax.sharding.host_memory import PINNED, AbsentHost, on_device
from mtjax.sharding.param_specs import ParamSpec
from mtjax.train.optimizer import make_optimizer
from mtjax.train.rounding import round_master, rows_of
from mtjax.train.step import LossInputs, TrainStep, optimizer_step_count

Tree = Any


class OffloadedStep(TrainStep):
    """A train step with the optimizer's moments in the host's memory, and with `parameters` the trained parameters.

    Then a step begins with a copy of them on the device, matrices in the compute dtype, which it drops at its end.

    Raises:
      UserError: as of `TrainStep`.
    """

    @property
    def moves_parameters(self) -> bool:
        """Whether trained parameters are in the host's memory as well."""
        return "parameters" in self.config.parallel.offload.split(",")

    @cached_property
    def state_sharding(self) -> State:
        """See `TrainStep.state_sharding`."""
        state = super().state_sharding
        if not self.moves_parameters:
            return state
        return replace(state, parameters=self._of_trained(_pinned, state.parameters))

    def optimizer_sharding(self) -> Tree:
        """See `TrainStep.optimizer_sharding`."""
        return of_moments(_pinned, super().optimizer_sharding())

    @cached_property
    def abstract_state(self) -> State:
        """See `TrainStep.abstract_state`."""

        def on_host(a: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=typed_on_host(a.sharding))

        state = super().abstract_state
        parameters = self._of_trained(on_host, state.parameters) if self.moves_parameters else state.parameters
        return replace(state, parameters=parameters, optimizer=of_moments(on_host, state.optimizer))

    def initialize(self, seed: int, parameters: Tree = None) -> State:
        """See `TrainStep.initialize`; the moments never are on the device."""
        state = super().initialize(seed, parameters)
        state = replace(state, parameters=jax.device_put(state.parameters, self.state_sharding.parameters))
        return replace(state, optimizer=zero_moments(state.optimizer, self.abstract_state.optimizer))

    @cached_property
    def _compiled_initial(self) -> Any:
        def initial(key: Array, parameters: Tree = None) -> State:
            return _state_without_moments(self._initial(key, parameters))

        there = replace(_state_without_moments(self.state_sharding), parameters=self.parameter_sharding)
        return jax.jit(initial, donate_argnums=1, out_shardings=there)

    def training_point(self, state: State) -> Tree:
        """See `TrainStep.training_point`; copies on the device, matrices in the compute dtype."""
        if not self.moves_parameters:
            return super().training_point(state)
        with jax.named_scope("parameters"):
            trainable = self.optimized(state.parameters)
            copies = narrow_copies(self.optimized(self._narrow(self.records)), trainable)
        return self.with_optimized(state.parameters, copies)

    def loss_inputs(self, parameters: Tree, batch: Batch) -> LossInputs:
        """See `TrainStep.loss_inputs`."""
        inputs = super().loss_inputs(parameters, batch)
        if not self.moves_parameters:
            return inputs
        return inputs._replace(region=replace(inputs.region, records=self._narrow(inputs.region.records)))

    def _narrow(self, records: Tree) -> Tree:
        """Returns the records of the copies."""
        narrow = partial(narrow_record, dtype=self.config.training.compute_dtype)
        return jax.tree.map(narrow, records)

    def _of_trained(self, function: Callable[[Any], Any], tree: Tree) -> Tree:
        """Applies a function to what the optimizer changes, in a tree like the parameters'."""
        return self.with_optimized(tree, jax.tree.map(function, self.optimized(tree)))

    def updated(
        self, state: State, gradients: Tree, parts: dict[str, Array], norm: Array, finite: Array
    ) -> tuple[Tree, Tree]:
        """See `TrainStep.updated`."""
        trainable = self.optimized(state.parameters)
        how = Update(self.config, self.trainable_records, self.layer_orders)
        return streamed_update(how, gradients, state.optimizer, trainable, finite, norm)


def _pinned(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(PINNED)


def narrow_record(record: ParamSpec, dtype: str) -> ParamSpec:
    """Returns the record of a trained parameter's copy: of matrices that products read in the compute dtype, in it."""
    is_narrow = record.is_trainable and gathers_in_compute_dtype(record.axes)
    return replace(record, dtype=dtype) if is_narrow else record


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


def _state_without_moments(state: State) -> State:
    return replace(state, optimizer=without_moments(state.optimizer))


def of_moments(function: Callable[[Any], Any], state: Tree) -> Tree:
    """Applies a function to each array of the moments."""
    return on_adam(lambda a: a._replace(mu=jax.tree.map(function, a.mu), nu=jax.tree.map(function, a.nu)), state)


def zero_moments(optimizer: Tree, abstract: Tree) -> Tree:
    """Returns an optimizer's state with moments of zeros, which are made in the host's memory."""
    like = adam_of(abstract)

    def zeros(a: Any) -> Array:
        def shard(index: Any) -> np.ndarray:
            return np.zeros(a.sharding.shard_shape(a.shape), a.dtype)

        return jax.make_array_from_callback(a.shape, a.sharding, shard)

    mu, nu = (jax.tree.map(zeros, tree) for tree in (like.mu, like.nu))
    return on_adam(lambda a: a._replace(mu=mu, nu=nu), optimizer)


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
        place = joined_spec(spec[0], None, *spec[1:])
        return lax.reshape(stack, (self.count, self.layers, *stack.shape[1:]), out_sharding=place)

    def joined(self, stack: Array) -> Array:
        """Undoes `divided`."""
        spec = jax.typeof(stack).sharding.spec
        shape = self.count * self.layers, *stack.shape[2:]
        return lax.reshape(stack, shape, out_sharding=joined_spec(spec[0], *spec[2:]))

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
        """Returns the parameter and its moments, each in the memory in which it was given.

        Args:
          record: of the parameter.
          g: gradient.
          p: parameter.
          mu: first moment.
          nu: second moment.
          rows: numbers of the layers, if these are some of a stack's.
        """
        memories = [jax.typeof(a).memory_space for a in (p, mu, nu)]
        p, mu, nu = on_device([p, mu, nu])
        rule: Any = make_optimizer(self.config, [record])
        state = on_adam(lambda a: a._replace(mu=[mu], nu=[nu]), self.others)
        master = p.astype(jnp.float32)
        updates, state = rule.update([g * self.factor], state, [master])
        new: Any = optax.apply_updates([master], updates)
        after, seed = adam_of(state), self.config.training.seed
        rounded = round_master(new[0], record, seed, optimizer_step_count(self.others), rows)
        new, *moments = jax.tree.map(partial(jnp.where, self.finite), (rounded, after.mu[0], after.nu[0]), (p, mu, nu))
        new, mu, nu = (sent(a, memory) for a, memory in zip((new, *moments), memories, strict=True))
        return new, mu, nu

    def counted(self) -> Tree:
        """Returns the optimizer's state after the step, without moments."""
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
    factor = jnp.minimum(1.0, clip / norm) if clip else 1.0
    unclipped = replace(how.config, optimizer=replace(how.config.optimizer, clip_grad_norm=0.0))
    one = Streamed(unclipped, without_moments(optimizer), factor, finite)
    adam, (leaves, structure) = adam_of(optimizer), jax.tree.flatten(parameters)
    every = jax.tree.leaves(how.records)
    arrays = list(zip(*map(jax.tree.leaves, (gradients, parameters, adam.mu, adam.nu)), strict=True))
    # XLA: without the barrier what the step has read of a parameter at its beginning would be kept for its update.
    apart = lambda g, p, *moments: (*lax.optimization_barrier((g, p)), *moments)  # noqa: E731
    new: list[Any] = [None if r.is_stacked else one(r, *apart(*each)) for r, each in zip(every, arrays, strict=True)]
    for ranks, members in stacks_by_ranks(every, leaves).items():
        results = _through_layers(one, ranks, [every[i] for i in members], [arrays[i] for i in members], how.orders)
        for i, result in zip(members, results, strict=True):
            new[i] = result
    updated, mu, nu = (structure.unflatten(column) for column in zip(*new, strict=True))
    return updated, on_adam(lambda a: a._replace(mu=mu, nu=nu), one.counted())


def _through_layers(
    one: Streamed, ranks: Ranks, records: list[ParamSpec], arrays: list[tuple[Array, ...]], orders: Orders
) -> list[tuple[Array, ...]]:
    """Updates stacks, on each rank one layer of all of them at a time.

    Args:
      one: the update.
      ranks: of the stacks.
      records: of the stacks.
      arrays: gradients, parameters and both moments of each.
      orders: of layers.
    """
    numbers = [ranks.numbers(order_of(record.name, orders)) for record in records]

    def body(k: Array, carry: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        following = []
        for record, stack, rows in zip(records, carry, numbers, strict=True):
            after = one(record, *(ranks.layer(a, k) for a in stack), rows=rows[k])
            written = (ranks.with_layer(a, b, k) for a, b in zip(stack[1:], after, strict=True))
            following.append((stack[0], *written))
        return following

    divided = [tuple(map(ranks.divided, stack)) for stack in arrays]
    return [tuple(map(ranks.joined, stack[1:])) for stack in lax.fori_loop(0, ranks.layers, body, divided)]


def narrow_copies(records: Tree, parameters: Tree) -> Tree:
    """Copies parameters from the host's memory to the device, one layer of stacks at a time.

    Args:
      records: of the copies.
      parameters: like them, but in float32.
    """
    leaves, structure = jax.tree.flatten(parameters)
    every = jax.tree.leaves(records)
    cast = lambda a, record: on_device(a).astype(record.dtype)  # noqa: E731
    new: list[Any] = [None if r.is_stacked else cast(a, r) for a, r in zip(leaves, every, strict=True)]
    for ranks, members in stacks_by_ranks(every, leaves).items():
        stacks = [ranks.divided(leaves[i]) for i in members]
        records_of = [every[i] for i in members]

        def body(k: Array, copies: list[Array], stacks: Any = stacks, of: Any = records_of, ranks: Any = ranks) -> Any:
            layers = [cast(ranks.layer(a, k), record) for a, record in zip(stacks, of, strict=True)]
            return [ranks.with_layer(copy, layer, k) for copy, layer in zip(copies, layers, strict=True)]

        empty = [
            jnp.zeros(a.shape, r.dtype, out_sharding=jax.typeof(a).sharding.spec)
            for a, r in zip(stacks, records_of, strict=True)
        ]
        for i, copy in zip(members, lax.fori_loop(0, ranks.layers, body, empty), strict=True):
            new[i] = ranks.joined(copy)
    return structure.unflatten(new)


def sent(array: Array, memory: Any) -> Array:
    """Copies a traced array to a memory, unless it is there."""
    return array if jax.typeof(array).memory_space == memory else jax.device_put(array, memory)


def typed_on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in the host's memory, also of devices that are compiled for without being there."""
    if sharding.memory_kind == PINNED:
        return sharding
    return AbsentHost(sharding.mesh, sharding.spec)
