"""The train step: optimizer state on top of a model on a mesh, and the compiled programs that initialize and update it.

`inspect` and the planner build the same `TrainStep` on compile-only devices.
"""

from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.layout.divisibility import num_microbatches
from mtjax.layout.layouts import Layout
from mtjax.layout.stages import layer_numbers
from mtjax.models.language_model import TrunkLossFunction
from mtjax.models.sharded_model import GlobalBatch, ShardedModel
from mtjax.runtime import xla_options
from mtjax.runtime.train_state import State
from mtjax.sharding.axes import use_rules
from mtjax.sharding.gradients import ManualRegion, distributed_gradients, total_loss
from mtjax.sharding.param_specs import partition_specs, replicated, shardings, trained, with_sharding
from mtjax.sharding.zero import StepReduction
from mtjax.train.optimizer import ALL_FINITE, make_learning_rate, make_optimizer, norm_and_first_bad

Tree = Any


class LossInputs(NamedTuple):
    """The loss function that a step differentiates, its region, and the parameters and batch that it reads."""

    loss_function: TrunkLossFunction
    region: ManualRegion
    parameters: Tree
    batch: GlobalBatch


class TrainStep(ShardedModel):
    """A config's model on a mesh, and the step that trains it; it holds no arrays.

    `xla` holds the compiler options of the step, `trainable_records` the `ParamSpec`s of the parameters that the
    optimizer changes. `make_train_step` extends it for settings (`mtjax.train.kinds`): by subclasses with another
    `step_reduction_type` or `step_region`, or whose methods change what is drawn (`build`, `draw_float32`),
    differentiated (`training_point`, `loss_inputs`, `loss_weights`), scaled (`initial_loss_scale`) or updated
    (`optimized`, `with_optimized`, `is_update`, `updated`, `rescaled`).

    Raises:
      UserError: the mesh does not divide the model or its batch.
    """

    step_reduction_type: ClassVar[type[StepReduction]] = StepReduction

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        if config.training.recompute_offload:
            from mtjax.models.layer_loop import LayerLoopSettings
            from mtjax.models.recompute_methods import check_offload

            check_offload(LayerLoopSettings.of(config.training), mesh.devices.flat[0].platform)
        super().__init__(config, mesh, layout, trains=True)
        self.xla = xla_options.choose(self.config, mesh)
        self.trainable_records = self.optimized(self.records)
        self.optimizer = make_optimizer(config, self.trainable_records, self.layer_orders)
        self.learning_rate = make_learning_rate(config.optimizer, config.training.steps)

    def optimized(self, tree: Tree) -> Tree:
        """Selects from a tree like the parameters' what the optimizer changes: what is trained, but 8-bit scales."""
        return trained(self.records, tree)

    @cached_property
    def state_sharding(self) -> State:
        """The sharding of each array of the state."""
        everywhere = replicated(self.mesh)
        loss_scale = jax.tree.map(lambda _: everywhere, jax.eval_shape(self.initial_loss_scale))
        return State(everywhere, everywhere, self.parameter_sharding, self.optimizer_sharding(), loss_scale)

    def optimizer_sharding(self) -> Tree:
        """Returns the sharding of each array of the optimizer's state: counters are replicated."""
        # Adam's moments are sharded like the stored parameters: with ZeRO over the data parallel ranks as well. XLA:
        # without shardings, a jitted `init` replicates them on every device.
        moments = shardings(partition_specs(self.trainable_records, "storage_spec"), self.mesh)
        state = jax.eval_shape(self.optimizer.init, self.optimized(self.abstract_parameters))
        like_parameter, everywhere = lambda _, sharding: sharding, lambda _: replicated(self.mesh)
        return optax.tree_map_params(self.optimizer, like_parameter, state, moments, transform_non_params=everywhere)

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state; a checkpoint is restored into it."""
        with jax.set_mesh(self.mesh):
            state = jax.eval_shape(self._initial, jax.eval_shape(lambda: jax.random.key(0)))
        return with_sharding(state, self.state_sharding)

    def initialize(self, seed: int, parameters: Tree = None) -> State:
        """Initializes the state directly in its sharding, with the same values on every mesh.

        If `parameters` are given, they are donated, and only the other parts of the state are initialized.
        """
        return self.on_mesh(self._compiled_initial, jax.random.key(seed), parameters)

    def step(self, state: State, batch: GlobalBatch) -> tuple[State, dict[str, Array]]:
        """Runs one optimizer step, donating `state`; returns the new state and metrics.

        The metrics are scalars, except those of experts: loss, grad_norm, learning_rate, tokens, skipped; each loss by
        name if there are several (with experts, "loss" is that of the tokens, without the router losses); expert_load,
        the tokens per expert of each layer; and first_bad, the index of the first tensor that is not finite, in
        `skipped_steps.tensors_of`. If there is one, the step is skipped: trained parameters and the optimizer's state
        stay as they are, skipped is 1 and grad_norm 0.
        """
        return self.on_mesh(self._compiled_step, state, batch)

    def layer_numbers(self, name: str) -> tuple[int, ...]:
        """Returns the numbers, in the model, of the layers whose parameters an array stacks, by its dotted name."""
        return layer_numbers(self.config.model, name)

    def lower_step(self, global_batch_size: int | None = None) -> jax.stages.Lowered:
        """Lowers the train step from abstract values, without touching a device."""
        arguments = self.abstract_state, self.abstract_step_batch(global_batch_size)
        # Not by `on_mesh`, which would be a frame more above every operation of the step in tracebacks and profiles.
        with jax.set_mesh(self.mesh):
            return self._compiled_step.lower(*arguments)

    def abstract_step_batch(self, global_batch_size: int | None = None) -> GlobalBatch:
        """Returns shapes, dtypes and shardings of the step's inputs: a batch of data, and additions such as a teacher's
        targets."""
        return self.abstract_batch(global_batch_size)

    def lower_initialize(self, seed: int, parameters: Tree = None) -> jax.stages.Lowered:
        """Lowers `initialize`; `parameters` are abstract."""
        return self.on_mesh(self._compiled_initial.lower, jax.random.key(seed), parameters)

    # --- the compiled functions

    @cached_property
    def _compiled_initial(self) -> Any:
        return jax.jit(self._initial, donate_argnums=1, out_shardings=self.state_sharding)

    @cached_property
    def _compiled_step(self) -> Any:
        everywhere = replicated(self.mesh)
        shardings, options = (self.state_sharding, everywhere), self.xla.options
        # The old state's memory becomes the new state's, so that a step never holds both.
        return jax.jit(self._step, donate_argnums=0, out_shardings=shardings, compiler_options=options or None)

    def _initial(self, key: Array, parameters: Tree = None) -> State:
        if parameters is None:
            parameters = self.draw(key)
        # Dropout draws from the half of the key that `draw` does not use.
        random = jax.random.key_data(jax.random.split(key)[1])
        optimizer = self.optimizer.init(optax.tree.cast(self.optimized(parameters), jnp.float32))
        return State(jnp.zeros((), jnp.int32), random, parameters, optimizer, self.initial_loss_scale())

    def initial_loss_scale(self) -> Any:
        """Builds the loss scale of float16; None of other types, which need none."""
        return None

    def _step(self, state: State, batch: GlobalBatch) -> tuple[State, dict[str, Array]]:
        loss, losses, gradients = self.gradients(*self.gradient_inputs(state, batch))
        return self.apply_gradients(state, batch, loss, losses, gradients)

    def gradient_inputs(self, state: State, batch: GlobalBatch) -> tuple[Tree, GlobalBatch, Array, Array | None]:
        """Returns the arguments of `gradients` in a step."""
        scale = None if state.loss_scale is None else state.loss_scale.scale
        return self.training_point(state), batch, jax.random.wrap_key_data(state.random), scale

    def training_point(self, state: State) -> Tree:
        """Returns the parameters at which gradients are taken."""
        return state.parameters

    def with_optimized(self, parameters: Tree, new: Tree) -> Tree:
        """Returns parameters in which what the optimizer changes is that of `new`."""
        if self.optimized(parameters) is parameters:
            return new
        from mtjax.sharding.trainable import merge_trees, select_frozen

        return merge_trees(new, select_frozen(self.records, parameters))

    def apply_gradients(
        self, state: State, batch: GlobalBatch, loss: Array, losses: dict[str, Array], gradients: Tree
    ) -> tuple[State, dict[str, Array]]:
        """Traces the optimizer update; returns the next state and metrics."""
        with jax.named_scope("optimizer"):
            how = (self.trainable_records, self.layer_numbers, bool(self.config.training.unroll_layers))
            norm, bad = norm_and_first_bad(loss, gradients, *how)
            finite = bad == ALL_FINITE
            applies = finite & self.is_update(state)
            trained_parameters, optimizer_state = self.updated(state, gradients, losses, norm, applies)
            metrics = {
                "loss": loss,
                "grad_norm": jnp.where(finite, norm, 0.0),
                "learning_rate": jnp.asarray(self.learning_rate(optimizer_step_count(state.optimizer)), jnp.float32),
                "tokens": self.model_class.num_tokens(batch),
                "skipped": 1.0 - finite.astype(jnp.float32),
                "first_bad": bad,
                **losses,
            }
        parameters = self.with_optimized(state.parameters, trained_parameters)
        return State(state.step + 1, state.random, parameters, optimizer_state, state.loss_scale), metrics

    def is_update(self, state: State) -> Array | bool:
        """Returns whether a step from this state updates anything, if its gradients are finite."""
        del state
        return True

    def updated(
        self, state: State, gradients: Tree, losses: dict[str, Array], norm: Array, applies: Array
    ) -> tuple[Tree, Tree]:
        """Traces the optimizer; returns the trained parameters and its state, as they were unless the update applies.

        Args:
          state: before the step.
          gradients: of the trained parameters.
          losses: each by name, with counters, such as the load of experts.
          norm: of all gradients.
          applies: whether the update is applied.
        """
        trainable = self.optimized(state.parameters)
        masters = optax.tree.cast(trainable, jnp.float32)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, masters, norm=norm)
        updated = self.rescaled(optax.apply_updates(masters, updates), losses, state)
        # A step with nonfinite gradients is skipped on all devices, by selects instead of a conditional.
        return jax.tree.map(partial(jnp.where, applies), (updated, optimizer), (trainable, state.optimizer))

    def rescaled(self, updated: Tree, losses: dict[str, Any], state: State) -> Tree:
        """Changes trained parameters, float32, after their update; `losses` are those of `gradients`."""
        del losses, state
        return updated

    def gradients(
        self, parameters: Tree, batch: GlobalBatch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """Traces the forward and backward pass.

        Dropout keys are derived from `key`; None turns dropout off. `scale` is float16's loss scale, which is divided
        out of the results.

        Returns:
          The sum of all losses, float32 []; each loss by name if there are several, with counters, such as the load of
          each layer's experts; and the gradients, float32, sharded as `storage_spec`. Losses are means over the batch.
        """
        weights = self.loss_weights(batch)
        if scale is not None:  # scaling the weights scales the loss and all cotangents
            weights = {name: w * scale for name, w in weights.items()}
        # One dropout key per sample, derived from its index in the run: the same masks on every mesh.
        keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(batch["sample_index"])
        count = num_microbatches(self.config, self.mesh_shape, len(batch["sample_index"]))
        loss_function, region, parameters, batch = self.loss_inputs(parameters, batch)
        inputs = region.shard_batch((batch, weights, keys))
        step_reduction = self.step_reduction_type(region.trained_records, self.layout.zero, count, self.stages)
        with use_rules(self.layout.rules):
            gradients_of = distributed_gradients(
                loss_function, inputs, region, self.microbatch_schedule(count), step_reduction
            )
            losses, gradients = gradients_of(parameters, inputs)
        loss = total_loss(losses)
        losses = losses if len(losses) > 1 else {}
        if scale is not None:
            loss, losses, gradients = jax.tree.map(lambda value: value / scale, (loss, losses, gradients))
        return loss, losses, gradients

    def loss_weights(self, batch: GlobalBatch) -> dict[str, Array]:
        """Returns weights for the values of each loss; the loss is the weighted sum."""
        # Divided by the global token count here, so that sums over microbatches and ranks give the global mean, not a
        # mean of per-microbatch means.
        return {name: w / jnp.maximum(w.sum(), 1) for name, w in self.model_class.loss_weights(batch).items()}

    def loss_inputs(self, parameters: Tree, batch: GlobalBatch) -> LossInputs:
        """Returns the function and inputs that `gradients` differentiates."""
        return LossInputs(self.loss_function(self.loss_options), self.step_region, parameters, batch)


def optimizer_step_count(optimizer: Tree) -> Array:
    """Returns the number of optimizer updates, by which the learning rate changes; skipped steps do not count."""
    # The learning rate's own count, after Adam's: they differ in a run that Megatron-LM began with smaller batches.
    return optax.tree.get_all_with_path(optimizer, "count")[-1][1]


def make_train_step(config: Config, mesh: Mesh) -> TrainStep:
    """Builds the train step of `config` on an attached or compile-only `mesh`.

    Raises:
      UserError: the mesh does not divide the model or its batch.
    """
    # Imported here, as it imports this file.
    from mtjax.train.kinds import step_class

    return step_class(config)(config, mesh)
