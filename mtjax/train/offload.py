"""Adam's moments in the host's pinned memory, streamed through the update on the device, layer by layer.

A loop over layers carries the stacks in the host's memory: it copies one layer's moments to the device, updates them
and the parameters, and writes them back in place. Of other forms XLA starts all copies before the first update, or
keeps a second copy of the stacks (docs/notes/memory.md).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.layout.layouts import Layout
from mtjax.layout.mesh import MeshShape
from mtjax.runtime.train_state import State
from mtjax.sharding.host_memory import DEVICE, HOST, PINNED, AbsentHost
from mtjax.sharding.param_specs import ParamSpec
from mtjax.train.optimizer import make_optimizer
from mtjax.train.rounding import round_master
from mtjax.train.step import TrainStep, optimizer_step_count

Tree = Any


class OffloadedStep(TrainStep):
    """A train step with the optimizer's moments in the host's memory.

    Raises:
      UserError: as of `TrainStep`, or the mesh has pipeline stages.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        super().__init__(config, mesh, layout)
        check_offload(config, self.shape)

    def optimizer_sharding(self) -> Tree:
        """See `TrainStep.optimizer_sharding`."""
        return of_moments(lambda sharding: sharding.with_memory_kind(PINNED), super().optimizer_sharding())

    @cached_property
    def abstract_state(self) -> State:
        """See `TrainStep.abstract_state`."""

        def on_host(a: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=typed_on_host(a.sharding))

        state = super().abstract_state
        return replace(state, optimizer=of_moments(on_host, state.optimizer))

    def initialize(self, seed: int, parameters: Tree = None) -> State:
        """See `TrainStep.initialize`; the moments never are on the device."""
        state = super().initialize(seed, parameters)
        return replace(state, optimizer=zero_moments(state.optimizer, self.abstract_state.optimizer))

    @cached_property
    def _compiled_initial(self) -> Any:
        def initial(key: Array, parameters: Tree = None) -> State:
            return _state_without_moments(self._initial(key, parameters))

        return jax.jit(initial, donate_argnums=1, out_shardings=_state_without_moments(self.state_sharding))

    def updated(
        self, state: State, gradients: Tree, parts: dict[str, Array], norm: Array, finite: Array
    ) -> tuple[Tree, Tree]:
        """See `TrainStep.updated`."""
        trainable, records = self.optimized(state.parameters), self.trainable_records
        return streamed_update(self.config, records, gradients, state.optimizer, trainable, finite, norm)


def check_offload(config: Config, shape: MeshShape) -> None:
    """Checks that the optimizer's states can be offloaded on this mesh.

    Raises:
      UserError: they can't.
    """
    if shape.has_pipeline:
        raise UserError(
            f"offload optimizer streams layer by layer, and mesh {config.parallel.mesh} divides layers into pipeline "
            "stages: use a mesh without stages, or offload none"
        )


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
class Streamed:
    """The update of one array, or of one layer of a stack."""

    config: Config
    """Without clipping, which needs all gradients."""
    others: Tree
    """The optimizer's state without moments."""
    factor: Array | float
    """Of clipping."""
    finite: Array
    """Whether the step counts."""
    memory: Any = HOST
    """Where the moments are; tests have them on the device, to compare."""

    def __call__(
        self, record: ParamSpec, g: Array, p: Array, mu: Array, nu: Array, layer: Array | None = None
    ) -> tuple[Array, Array, Array]:
        """Returns the parameter, or its layer of a number, and its moments, which are in `memory` before and after."""
        mu, nu = (jax.device_put(m, DEVICE) for m in (mu, nu))
        rule: Any = make_optimizer(self.config, [record])
        state = on_adam(lambda a: a._replace(mu=[mu], nu=[nu]), self.others)
        master = p.astype(jnp.float32)
        updates, state = rule.update([g * self.factor], state, [master])
        new: Any = optax.apply_updates([master], updates)
        after, seed = adam_of(state), self.config.training.seed
        rounded = round_master(new[0], record, seed, optimizer_step_count(self.others), layer=layer)
        new, *moments = jax.tree.map(partial(jnp.where, self.finite), (rounded, after.mu[0], after.nu[0]), (p, mu, nu))
        mu, nu = (jax.device_put(m, self.memory) for m in moments)
        return new, mu, nu

    def counted(self) -> Tree:
        """Returns the optimizer's state after the step, without moments."""
        rule: Any = make_optimizer(self.config, [])
        _, state = rule.update([], on_adam(lambda a: a._replace(mu=[], nu=[]), self.others), [])
        return jax.tree.map(partial(jnp.where, self.finite), without_moments(state), self.others)


def streamed_update(
    config: Config,
    records: Tree,
    gradients: Tree,
    optimizer: Tree,
    parameters: Tree,
    finite: Array,
    norm: Array,
    memory: Any = HOST,
) -> tuple[Tree, Tree]:
    """Traces the update; returns the parameters and the optimizer's state.

    Args:
      config: of the run.
      records: `ParamSpec` of the trained parameters.
      gradients: in a tree like theirs.
      optimizer: state, with moments in `memory`.
      parameters: the trained ones.
      finite: whether the step counts.
      norm: of all gradients.
      memory: of the moments.
    """
    clip = config.optimizer.clip_grad_norm
    factor = jnp.minimum(1.0, clip / norm) if clip else 1.0
    unclipped = replace(config, optimizer=replace(config.optimizer, clip_grad_norm=0.0))
    one = Streamed(unclipped, without_moments(optimizer), factor, finite, memory)
    adam, (leaves, structure) = adam_of(optimizer), jax.tree.flatten(parameters)
    every = jax.tree.leaves(records)
    arrays = list(zip(*map(jax.tree.leaves, (gradients, parameters, adam.mu, adam.nu)), strict=True))
    new: list[Any] = [None] * len(leaves)
    stacks: dict[int, list[int]] = defaultdict(list)
    for i, record in enumerate(every):
        # Stacks that ZeRO-1 shards along their layers can't be indexed by layer: they are small, and are sent whole.
        if record.is_stacked and not record.storage_spec[0]:
            stacks[leaves[i].shape[0]].append(i)
        else:
            new[i] = one(record, *arrays[i])
    for depth, members in stacks.items():
        results = _through_layers(one, depth, [every[i] for i in members], [arrays[i] for i in members])
        for i, result in zip(members, results, strict=True):
            new[i] = result
    updated, mu, nu = (structure.unflatten(column) for column in zip(*new, strict=True))
    return updated, on_adam(lambda a: a._replace(mu=mu, nu=nu), one.counted())


def _through_layers(
    one: Streamed, depth: int, records: list[ParamSpec], arrays: list[tuple[Array, ...]]
) -> list[tuple[Array, ...]]:
    """Updates stacks of `depth` layers, one layer of all of them at a time.

    Args:
      one: the update.
      depth: layers.
      records: of the stacks.
      arrays: gradients, parameters and both moments of each.
    """

    def body(k: Array, carry: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        following = []
        for record, stack in zip(records, carry, strict=True):
            layer = (lax.dynamic_index_in_dim(a, k, keepdims=False) for a in stack)
            after = one(record, *layer, layer=k)
            written = (lax.dynamic_update_index_in_dim(a, b, k, 0) for a, b in zip(stack[1:], after, strict=True))
            following.append((stack[0], *written))
        return following

    return [stack[1:] for stack in lax.fori_loop(0, depth, body, arrays)]


def typed_on_host(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding in the host's memory, also of devices that are compiled for without being there."""
    if sharding.memory_kind == PINNED:
        return sharding
    return AbsentHost(sharding.mesh, sharding.spec)
