"""The train step with products in 8-bit floats: with delayed scaling it also updates scales."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, auto_axes, reshard

from mtjax.config import Config
from mtjax.config.float8 import EXPONENTS, STATE, quantizes_once
from mtjax.layout.float8 import check_float8_gpu
from mtjax.layout.layouts import Layout
from mtjax.models.evaluation import Evaluation
from mtjax.models.float8 import UNSEEN
from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.train_state import State
from mtjax.sharding.axes import REPLICATED
from mtjax.sharding.float8 import E4M3
from mtjax.sharding.float8_scales import fitting_scale, scale_at
from mtjax.sharding.float8_weights import Float8Reduction, quantize_stack
from mtjax.train.step import TrainStep

Tree = Any
EXTRA_PASSES = 6
"""Passes allowed in addition to one a layer. Of a layer at most five products follow one another (query_down, query_up,
output, up, down), and values that are clipped pass them one by one; another pass finds that nothing changes. As
nothing is clipped in the residual stream, the products of all layers advance in the same passes, and one more for each
layer allows for what layers change in one another."""
JOINED = ("query", "key_value")
"""Linear layers of grouped attention, which are one product with one state."""


class Float8Step(TrainStep):
    """A train step whose layers multiply in 8 bits.

    Raises:
      UserError: the mesh's devices have no 8-bit products, or the mesh does not divide the model or its batch.
    """

    reduction_type = Float8Reduction

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        device = mesh.devices.flat[0]
        if device.platform != "cpu":
            # Compile-only devices may not report one: 9.0 then, as the planner assumes.
            capability = tuple(int(part) for part in getattr(device, "compute_capability", "9.0").split("."))
            check_float8_gpu(config.training.fp8, device.device_kind, capability)
        super().__init__(config, mesh, layout)

    def is_trainable(self, name: str) -> bool:
        """See `ShardedModel.is_trainable`; scales have no gradient, and counts are those of frozen weights, too."""
        if STATE in name.split("."):
            return name.endswith(".age")
        return super().is_trainable(name)

    def optimized(self, tree: Tree) -> Tree:
        """See `TrainStep.optimized`: the weights."""
        return split(super().optimized(tree))[0]

    def with_optimized(self, parameters: Tree, optimized: Tree) -> Tree:
        """See `TrainStep.with_optimized`; the states of products remain."""
        # The optimizer does not have the products' states: `apply_gradients` computes their next ones.
        return merge(super().with_optimized(parameters, optimized), split(parameters)[1])

    @property
    def restore_target(self) -> Tree:
        """See `ShardedModel.restore_target`; weights have no scales."""
        return split(super().restore_target)[0]

    def _initial(self, key: Array, parameters: Tree = None) -> State:
        # Weights from elsewhere have no scales: those of a new run are drawn, and then found.
        if parameters is not None:
            parameters = merge(parameters, split(self.draw(key))[1])
        return self._with_weight_scales(super()._initial(key, parameters))

    @cached_property
    def evaluation(self) -> Evaluation:
        """See `ShardedModel.evaluation`; schedule-free evaluates other weights than those that the scales fit."""
        return _Fitted(self) if self.config.optimizer.optimizer == "schedule-free" else Evaluation(self)

    def gradients(
        self, parameters: Tree, batch: GlobalBatch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """See `TrainStep.gradients`; before, quantizes the weights, for all microbatches and passes."""
        return super().gradients(self._with_quantized(parameters), batch, key, scale)

    def _with_quantized(self, parameters: Tree) -> Tree:
        """Returns parameters in which the layers' matrices are quantized, except those that some products read wide."""
        training = self.config.training
        ends = (training.fp8_bf16_first_layers, training.fp8_bf16_last_layers)
        if not quantizes_once(training.fp8, ends, self.config.model.lora_rank):
            return parameters
        return _quantize_weights(self.records, parameters, training.compute_dtype)

    def apply_gradients(
        self, state: State, batch: GlobalBatch, loss: Array, parts: dict[str, Array], gradients: Tree
    ) -> tuple[State, dict[str, Array]]:
        """See `TrainStep.apply_gradients`; then updates scales, unless the step is skipped."""
        weights, counts = split(gradients)
        after, metrics = super().apply_gradients(state, batch, loss, parts, weights)
        if not counts:
            return after, metrics
        is_update = self.is_update(state)
        with jax.named_scope("optimizer"):
            known, history = split(state.parameters)[1], self.config.training.fp8_amax_history
            states = next_states(known, counts, history, forgets=~is_update)
            moved = self._with_weight_scales(dataclasses.replace(after, parameters=merge(after.parameters, states)))
            keep = metrics["skipped"] == 0
            # Counts of gradients that are not finite say nothing about scales.
            parameters = jax.tree.map(lambda new, old: jnp.where(keep, new, old), moved.parameters, after.parameters)
        # A step that only finds scales was given the number inverted, and gives it back.
        step = jnp.where(is_update, after.step, ~state.step)
        return dataclasses.replace(after, step=step, parameters=parameters), metrics

    def is_update(self, state: State) -> Array:
        """See `TrainStep.is_update`; a step whose number is inverted (`~`) only finds scales."""
        return state.step >= 0

    def with_first_scales(self, state: State, batch: GlobalBatch) -> tuple[State, str | None]:
        """Finds the scales of delayed scaling with a batch, if no step has found any; nothing else changes.

        Returns:
          The state, which was donated; and what was done, in words. None if the state has scales; "" if the batch's
          gradients are not finite.
        """
        is_known, before = self._scales_of(state)
        if is_known:
            return state, None
        most = self.config.model.num_layers + EXTRA_PASSES
        # With the first scales, which are fixed numbers, values of one layer may be clipped or vanish, so that those of
        # the next are found wrong: passes are repeated until no scale becomes smaller by more than 1/8, and none more
        # than twice as large.
        for passes in range(1, most + 1):
            # Runs the program of a step, so that no second one is compiled.
            state, metrics = self.step(dataclasses.replace(state, step=~state.step), batch)
            _, after = self._scales_of(state)
            if float(metrics["skipped"]):
                return state, ""
            growth = after / np.where(before > 0, before, 1)
            # Exact scales have 8 steps to each power of two, and move by one with the rounding of other scales.
            if passes > 1 and ((growth >= 7 / 8) & (growth <= 2) | (before == 0)).all():
                return (
                    state,
                    f"fp8's first scales were found in {passes} passes over the first batch, without an update",
                )
            before = after
        return (
            state,
            f"fp8's first scales still changed after {most} passes over the first batch: gradients may be clipped",
        )

    def _scales_of(self, state: State) -> tuple[bool, np.ndarray]:
        """Returns whether a step has found any scale, and the scales of activations and gradients, [products, 2]."""
        states = split(state.parameters)[1]
        if not states:
            return True, np.ones(0)
        is_known, scales = self.on_mesh(_found, states)
        return bool(is_known), np.asarray(scales)

    def _with_weight_scales(self, state: State) -> State:
        """Returns a state whose scales of weights fit the next step's weights."""
        states = _fitted(split(state.parameters)[1], self.training_point(state))
        return dataclasses.replace(state, parameters=merge(state.parameters, states))


class _Fitted(Evaluation):
    """An evaluation that fits the scales to the weights it is given, not to the point of schedule-free's gradients."""

    def _losses(self, parameters: Tree, batch: GlobalBatch) -> dict[str, tuple[Array, Array]]:
        states = split(parameters)[1]
        return super()._losses(merge(parameters, _fitted(states, parameters)), batch)


@jax.jit
def _found(states: Tree) -> tuple[Array, Array]:
    """Returns whether any exponent was found, and the scales of x and g of all products and layers, [products, 2]."""

    def find(states: Tree) -> tuple[Array, Array]:
        leaves = jax.tree.leaves(states, is_leaf=lambda below: "scale" in below)
        # Scale and ages of padding layers are 0.
        known = [(state["age"] < UNSEEN).any((1, 2, 3)) & (state["scale"][:, 1] > 0) for state in leaves]
        return jnp.concatenate(known).any(), jnp.concatenate([state["scale"][:, ::2] for state in leaves])

    # Products are sharded in several ways; the partitioner gathers these few numbers of each.
    found: Any = auto_axes(find, out_sharding=(REPLICATED, REPLICATED))
    return found(states)


def next_states(states: Tree, counts: Tree, history: int, forgets: Array | bool = False) -> Tree:
    """Returns the states of products in the next step, by the counts of this one; weights' scales as they are.

    Args:
      states: of products, stacked along `layers`.
      counts: gradients of their `age`.
      history: number of steps whose largest values determine a scale.
      forgets: whether only this step's do.
    """

    def one(state: Tree, counted: Tree) -> Tree:
        state = {**state, "age": jnp.where(forgets, UNSEEN, state["age"])}
        # Smaller values of other ranks and microbatches count too: the state would depend on the mesh with them.
        found = jnp.max(counted["age"], -2) > 0
        largest = found & (jnp.cumsum(found, -1) == 1)
        is_recent = jnp.where(largest, 0.0, 1 - jnp.max(-state["age"], -2)) < history
        index = jnp.argmax(is_recent, -1)  # the least scale is that of the largest value
        new, is_known = scale_at(index, _digits(state)), is_recent.any(-1)
        x, g = (jnp.where(is_known[..., i], new[..., i], state["scale"][..., 2 * i]) for i in (0, 1))
        ages = jnp.where(largest[..., None, :], 0.0, state["age"] + 1)
        is_layer = state["scale"][..., 2:] > 0  # the state of padding remains 0
        return {
            "scale": jnp.where(is_layer, jnp.stack([x, state["scale"][..., 1], g], -1), 0.0),
            "age": jnp.where(is_layer[..., None, None], ages, 0.0),
        }

    return _map_states(one, states, counts)


def _digits(state: Tree) -> int:
    """Returns the binary digits of the inverse scales that a state counts: it has 2^(digits - 1) for each exponent."""
    return (state["age"].shape[-1] // EXPONENTS).bit_length()


def _map_states(function: Callable[..., Tree], states: Tree, *others: Tree) -> Tree:
    """Maps a function over states of products and equal trees."""
    if "scale" in states:
        return function(states, *others)
    return {name: _map_states(function, below, *(o[name] for o in others)) for name, below in states.items()}


def _quantize_weights(records: Tree, parameters: Tree, compute_dtype: str) -> Tree:
    """Quantizes the trained weights beside the states of products, with the scales of these."""
    if not isinstance(parameters, dict):
        return parameters
    after = {name: _quantize_weights(records[name], below, compute_dtype) for name, below in parameters.items()}
    if STATE not in parameters:
        return after
    scale = parameters[STATE]["scale"][..., 1]
    layers = [(records, after)] if "weight" in after else [(records[name], after[name]) for name in JOINED]
    # Query and key-value of grouped attention are two parameters, with the scale of their one product.
    for of_layer, linear in layers:
        if of_layer["weight"].is_trainable:
            linear["weight"] = quantize_stack(linear["weight"], scale, compute_dtype)
    return after


def _fitted(states: Tree, weights: Tree) -> Tree:
    """Returns states of products whose scales of weights fit these: the largest value of each layer's matrix."""
    after = {name: _fitted(below, weights[name]) for name, below in states.items() if name != STATE}
    if STATE not in states:
        return after
    state = states[STATE]
    matrices = [weights["weight"]] if "weight" in weights else [weights[name]["weight"] for name in JOINED]
    known = state["scale"][..., 1]
    # ZeRO-1 may shard weights along `layers`, and never scales.
    sharding = jax.typeof(known).sharding.spec
    each = [reshard(jnp.max(jnp.abs(m), axis=tuple(range(1, m.ndim))), sharding) for m in matrices]
    largest = jnp.stack(each).max(0).astype(jnp.float32)
    scale = fitting_scale(largest, E4M3, _digits(state))
    # The states of padding layers, whose weights are 0, remain 0.
    fitted = jnp.where(largest > 0, scale, known)
    return {**after, STATE: {**state, "scale": state["scale"].at[..., 1].set(fitted)}}


def split(parameters: Tree) -> tuple[Tree, Tree]:
    """Divides a tree like the parameters' into one without the states of products, and one of these alone."""
    weights, states = {}, {}
    for name, below in parameters.items():
        if name == STATE:
            states[name] = below
        elif isinstance(below, dict):
            weights[name], inside = split(below)
            if inside:
                states[name] = inside
        else:
            weights[name] = below
    return weights, states


def merge(weights: Tree, states: Tree) -> Tree:
    """Merges what `split` has divided; of leaves that both have, those of `states`."""
    if not isinstance(states, dict):
        return states
    return {**weights, **{name: merge(weights.get(name, {}), below) for name, below in states.items()}}
