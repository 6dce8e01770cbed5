"""What training adds to a model on a mesh: the optimizer's state, and the compiled programs that create and update it.

`inspect` and the planner build the same `Program` from compile-only devices.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, reshard

from mtjax.config import Config
from mtjax.models.layer_context import with_text_lengths
from mtjax.models.mixers.experts import LOAD, ROUTER_BIAS, report_weights
from mtjax.models.pipeline_model import TrunkPipeline
from mtjax.models.recompute import Recompute, check_offload
from mtjax.models.sharded_model import Batch, ShardedModel
from mtjax.sharding import placement
from mtjax.sharding.axes import use_rules
from mtjax.sharding.gradients import distributed_gradients
from mtjax.sharding.manual_region import ManualRegion
from mtjax.sharding.param_specs import ParamSpec, partition_specs
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.schedules.microbatch_schedule import total_loss
from mtjax.sharding.trainable import merge_trees, select_frozen, select_trainable
from mtjax.theory.divisibility import num_microbatches
from mtjax.theory.layout import Layout
from mtjax.theory.stages import PADDING, LayerOrder, Orders, layer_numbers, order_of
from mtjax.train import precision, xla_options
from mtjax.train.nonfinite_steps import GOOD, Tensor, first_bad, tensors
from mtjax.train.optimizer import make_optimizer
from mtjax.train.precision import LossScale
from mtjax.train.schedule import make_schedule

Tree = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "random", "parameters", "optimizer", "loss_scale"],
    meta_fields=[],
)
@dataclass(frozen=True)
class State:
    """Everything that a step changes, and everything that a checkpoint must hold of the model."""

    step: Any
    """Steps done, int32."""
    random: Any
    """Key data from which dropout derives."""
    parameters: Tree
    """Nested dicts of float32 arrays."""
    optimizer: Tree
    """optax state."""
    loss_scale: LossScale | None = None
    """For float16 only."""


class LossInputs(NamedTuple):
    """What is differentiated, as `distributed_gradients` takes it."""

    model: TrunkPipeline
    region: ManualRegion
    parameters: Tree
    batch: Batch


class TrainStep(ShardedModel):
    """A config's model on a mesh, and the step that trains it: abstract until a method is called.

    `xla` holds the compiler options of the step, `learnt_records` the records of the parameters that are trained.

    Raises:
      UserError: the model or its batch does not divide over the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        check_offload(Recompute.of(config.training), mesh.devices.flat[0].platform)
        super().__init__(config, mesh, layout, trains=True)
        self.xla = xla_options.choose(config, mesh)
        self.trainable_records = select_trainable(self.records, self.records)
        self.optimizer = make_optimizer(config, self.trainable_records, self.layer_orders)
        self.schedule = make_schedule(config.optimizer, config.training.steps)

    @cached_property
    def state_sharding(self) -> State:
        """Where each part of the state lives."""
        moments = placement.shardings(partition_specs(self.trainable_records, "storage_spec"), self.mesh)
        everywhere, like = placement.replicated(self.mesh), select_trainable(self.records, self.abstract_parameters)
        optimizer = placement.optimizer_shardings(self.optimizer, like, moments, self.mesh)
        scaled = self.config.training.compute_dtype == "float16"
        loss_scale = LossScale(everywhere, everywhere, everywhere) if scaled else None
        return State(everywhere, everywhere, self.parameter_sharding, optimizer, loss_scale)

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, types and shardings of the state: what a checkpoint is restored into."""
        with jax.set_mesh(self.mesh):
            state = jax.eval_shape(self._initial, jax.eval_shape(lambda: jax.random.key(0)))
        return placement.with_sharding(state, self.state_sharding)

    def initialize(self, seed: int, parameters: Tree = None) -> State:
        """A fresh state, created where it lives; the same values on every mesh.

        With `parameters`, which it consumes, only the rest is fresh.
        """
        return self.on_mesh(self._compiled_initial, jax.random.key(seed), parameters)

    def step(self, state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        """One optimizer step; consumes `state`. Metrics are scalars, but for what is counted of experts.

        They are loss, grad_norm, learning_rate, tokens, skipped, each loss by its name where there are several (of a
        model with experts "loss" is that of its tokens, without the routers'), expert_load, the tokens of each layer's
        experts, and first_bad: the first tensor that is not finite, by its place in `tensors`. If there is one,
        everything but the step's number stays as it was, skipped is 1 and grad_norm 0.
        """
        return self.on_mesh(self._compiled_step, state, batch)

    def layer_numbers(self, name: str) -> tuple[int, ...]:
        """The numbers of the layers whose parameters an array stacks, by its dotted name."""
        return layer_numbers(self.config.model, name)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that `first_bad` numbers."""
        return tensors(self.trainable_records, self.layer_numbers)

    def bad_parameter(self, parameters: Tree) -> Tensor | None:
        """A trained parameter that is not finite; None where all are."""

        def find(parameters: Tree) -> Array:  # finite values become 0: squares of large weights may overflow
            bad = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), 0.0, a), select_trainable(self.records, parameters))
            return first_bad(jnp.zeros(()), bad, self.trainable_records, self.layer_numbers)

        place = int(self.on_mesh(jax.jit(find), parameters))
        return None if place == GOOD else self.tensors[place]

    def lower_step(self, global_batch_size: int | None = None) -> jax.stages.Lowered:
        """The train step, lowered from abstract values: no device is touched."""
        return self.on_mesh(self._compiled_step.lower, self.abstract_state, self.abstract_step_batch(global_batch_size))

    def abstract_step_batch(self, global_batch_size: int | None = None) -> Batch:
        """Shapes, types and shardings of what a step reads: of a batch of the data, and what is added to it."""
        return self.abstract_batch(global_batch_size)

    def lower_initialize(self, seed: int, parameters: Tree = None) -> jax.stages.Lowered:
        """The program of `initialize`, lowered; `parameters` are abstract."""
        return self.on_mesh(self._compiled_initial.lower, jax.random.key(seed), parameters)

    # --- the compiled functions

    @cached_property
    def _compiled_initial(self) -> Any:
        return jax.jit(self._initial, donate_argnums=1, out_shardings=self.state_sharding)

    @cached_property
    def _compiled_step(self) -> Any:
        everywhere = placement.replicated(self.mesh)
        places, options = (self.state_sharding, everywhere), self.xla.options
        return jax.jit(self._step, donate_argnums=0, out_shardings=places, compiler_options=options or None)

    def _initial(self, key: Array, parameters: Tree = None) -> State:
        if parameters is None:
            parameters = self._drawn(key)
        random = jax.random.key_data(jax.random.split(key)[1])
        optimizer = self.optimizer.init(select_trainable(self.records, parameters))
        loss_scale = precision.initial(self.config.training)
        return State(jnp.zeros((), jnp.int32), random, parameters, optimizer, loss_scale)

    def _step(self, state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        return self.apply_gradients(state, batch, *self.loss_and_grads(state, batch))

    def loss_and_grads(self, state: State, batch: Batch) -> tuple[Array, dict[str, Array], Tree]:
        """The first half of a step, to be traced: see `gradients`."""
        scale = None if state.loss_scale is None else state.loss_scale.scale
        return self.gradients(state.parameters, batch, jax.random.wrap_key_data(state.random), scale)

    def apply_gradients(
        self, state: State, batch: Batch, loss: Array, parts: dict[str, Array], gradients: Tree
    ) -> tuple[State, dict[str, Array]]:
        """The second half of a step, to be traced: the next state, and metrics."""
        loss_scale, own = state.loss_scale, select_trainable(self.records, state.parameters)
        with jax.named_scope("optimizer"):
            updates, optimizer = self.optimizer.update(gradients, state.optimizer, own)
            updated = optax.apply_updates(own, updates)
            if self.config.model.router_bias:
                rate, orders = self.config.model.router_bias_update_rate, self.layer_orders
                updated = update_router_bias(self.trainable_records, updated, parts[LOAD], rate, orders)
            norm = optax.tree.norm(gradients)  # clipping divides by it
            bad = first_bad(loss + norm, gradients, self.trainable_records, self.layer_numbers)
            finite = bad == GOOD
            updated, optimizer = precision.choose(finite, (updated, optimizer), (own, state.optimizer))
            metrics = {
                "loss": loss,
                "grad_norm": jnp.where(finite, norm, 0.0),
                "learning_rate": jnp.asarray(self.schedule(optimizer_step_count(state.optimizer)), jnp.float32),
                "tokens": self.family.num_tokens(batch),
                "skipped": 1.0 - finite.astype(jnp.float32),
                "first_bad": bad,
                **parts,
            }
            if loss_scale is not None:
                metrics["loss_scale"] = loss_scale.scale
                loss_scale = precision.update(loss_scale, finite, self.config.training)
        parameters = merge_trees(updated, select_frozen(self.records, state.parameters))
        return State(state.step + 1, state.random, parameters, optimizer, loss_scale), metrics

    def gradients(
        self, parameters: Tree, batch: Batch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """The step's differentiated part, to be traced.

        Dropout derives from `key`; None turns it off. `scale` keeps float16 cotangents in range, and is divided out of
        the results.

        Returns:
          The loss, the sum of the family's and the routers' losses, each a mean over the global batch; each of them by
          name, where there are several, with the load of each layer's experts; and the gradients.
        """
        weights = self.loss_weights(batch) | report_weights(self.config.model, batch["sample_index"].shape[0])
        if scale is not None:
            weights = {name: w * scale for name, w in weights.items()}
        keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(batch["sample_index"])
        count = num_microbatches(self.config, self.shape, batch["sample_index"].shape[0])
        model, region, parameters, batch = self.loss_inputs(parameters, with_text_lengths(self.config.model, batch))
        part = (batch, weights, keys)
        learning_rate = self.microbatch_schedule(count)
        reduction = Reduction(self.trainable_records, self.layout.zero, count, self.stages)
        with use_rules(self.layout.rules):
            parts, gradients = distributed_gradients(model, parameters, part, region, learning_rate, reduction)
        loss = total_loss(parts)
        parts = parts if len(parts) > 1 else {}
        if scale is not None:
            loss, parts, gradients = jax.tree.map(lambda value: value / scale, (loss, parts, gradients))
        return loss, parts, gradients

    def loss_weights(self, batch: Batch) -> dict[str, Array]:
        """The weight of each value of each loss, of which the sums are then the loss."""
        # Divided by the global count here, so that sums over microbatches and ranks are the mean, not a mean of means.
        return {name: w / jnp.maximum(w.sum(), 1) for name, w in self.family.loss_weights(batch).items()}

    def loss_inputs(self, parameters: Tree, batch: Batch) -> LossInputs:
        """What `gradients` differentiates."""
        return LossInputs(self.pipeline_model(self.loss_options), self.region, parameters, batch)


def update_router_bias(records: Tree, parameters: Tree, load: Array, rate: float, orders: Orders) -> Tree:
    """Parameters with each router's biases changed by its experts' load, [layers, experts] tokens (arXiv 2408.15664).

    Their gradients are 0, so that the optimizer leaves them alone. `orders`: in which order layers are stacked.
    """
    behind = jnp.sign(load.sum(-1, keepdims=True) - load.shape[-1] * load)

    def one(record: ParamSpec, value: Array) -> Array:
        if not record.name.endswith(ROUTER_BIAS):
            return value
        order = order_of(record.name, orders)
        own = behind if order is None else to_stacked_order(behind, order)
        return value + reshard(rate * own, record.storage_spec)

    return jax.tree.map(one, records, parameters)


def to_stacked_order(rows: Array, order: LayerOrder) -> Array:
    """Rows of layers in the order in which their parameters are stacked; zeros where a stage has no layer."""
    places = jnp.asarray([len(rows) if number == PADDING else number for number in order.flat])
    return rows.at[places].get(mode="fill", fill_value=0)


def optimizer_step_count(optimizer: Tree) -> Array:
    """Steps that the optimizer has taken, by which its schedule goes: skipped ones do not count."""
    return optax.tree.get_all_with_path(optimizer, "count")[0][1]


def make_train_step(config: Config, mesh: Mesh) -> TrainStep:
    """The program of `config` on `mesh`, attached or compile-only; beside a teacher, where it has one.

    Raises:
      UserError: the model or batch does not divide over the mesh.
    """
    if config.finetuning.teacher is not None:
        from mtjax.train.distilled import Distilled  # a Program itself

        return Distilled(config, mesh)
    return TrainStep(config, mesh)
