"""Adam's moments, and master weights, in the host's pinned memory, streamed through the update on the device.

A loop over layers carries the stacks in the host's memory: it copies one layer's arrays to the device, updates them
there, and writes them back in place (`mtjax/train/streamed_update.py`). Of other forms XLA starts all copies before the
first update, or keeps a second copy of the stacks (docs/notes/memory.md). With pipeline stages each stage's loop is
over its own layers.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.train_state import State
from mtjax.sharding.host_memory import PINNED, AbsentHost, on_device
from mtjax.sharding.param_specs import ParamSpec
from mtjax.train.step import LossInputs, TrainStep
from mtjax.train.streamed_update import Update, adam_of, on_adam, stacks_by_ranks, streamed_update, without_moments

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

        # Parameters are drawn on the device, and sent to the host afterwards.
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

    def loss_inputs(self, parameters: Tree, batch: GlobalBatch) -> LossInputs:
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
        self, state: State, gradients: Tree, losses: dict[str, Array], norm: Array, applies: Array
    ) -> tuple[Tree, Tree]:
        """See `TrainStep.updated`."""
        trainable = self.optimized(state.parameters)
        how = Update(self.config, self.trainable_records, self.layer_orders)
        return streamed_update(how, gradients, state.optimizer, trainable, applies, norm)


def _pinned(sharding: NamedSharding) -> NamedSharding:
    return sharding.with_memory_kind(PINNED)


def narrow_record(record: ParamSpec, dtype: str) -> ParamSpec:
    """Returns the record of a trained parameter's copy: of matrices that products read in the compute dtype, in it."""
    is_narrow = record.is_trainable and gathers_in_compute_dtype(record.logical_axes)
    return replace(record, dtype=dtype) if is_narrow else record


def _state_without_moments(state: State) -> State:
    return replace(state, optimizer=without_moments(state.optimizer))


def of_moments(function: Callable[[Any], Any], state: Tree) -> Tree:
    """Applies a function to each array of the moments."""
    return on_adam(lambda a: a._replace(mu=jax.tree.map(function, a.mu), nu=jax.tree.map(function, a.nu)), state)


def zero_moments(optimizer: Tree, abstract: Tree) -> Tree:
    """Returns an optimizer's state with moments of zeros, which are made in the host's memory."""
    like = adam_of(abstract)

    def zeros(a: Any) -> Array:
        # Made by shards in the host: a program that returns zeros would make them on the device first.
        def shard(index: Any) -> np.ndarray:
            return np.zeros(a.sharding.shard_shape(a.shape), a.dtype)

        return jax.make_array_from_callback(a.shape, a.sharding, shard)

    mu, nu = (jax.tree.map(zeros, tree) for tree in (like.mu, like.nu))
    return on_adam(lambda a: a._replace(mu=mu, nu=nu), optimizer)


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
    # XLA: in a loop, one layer at a time: it would start all copies at once, and hold float32 parameters in full.
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


def typed_on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in the host's memory, also of devices that are compiled for without being there."""
    if sharding.memory_kind == PINNED:
        return sharding
    return AbsentHost(sharding.mesh, sharding.spec)
