"""Train steps of settings that most runs don't have: each extends methods of `TrainStep` (`mtjax.train.kinds`)."""

from dataclasses import replace
from typing import Any

import jax
from jax import Array

from mtjax.layout.optimizer_states import optimizer_states
from mtjax.models.prediction import prediction_reports, prediction_weights, with_predictions
from mtjax.models.routers import LOAD, report_weights, with_text_lengths
from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.train_state import State
from mtjax.sharding.optimizer_shardings import shardings_by_name
from mtjax.sharding.param_specs import partition_specs, shardings, with_sharding
from mtjax.train.loss_scale import LossScale, initial, update
from mtjax.train.optimizer import ALL_FINITE
from mtjax.train.optimizers import training_point
from mtjax.train.rounding import round_masters
from mtjax.train.router_bias import update_router_bias
from mtjax.train.step import LossInputs, TrainStep, optimizer_step_count

Tree = Any


class Float16Step(TrainStep):
    """A train step in float16, whose loss is scaled."""

    def initial_loss_scale(self) -> LossScale:
        """See `TrainStep.initial_loss_scale`."""
        return initial(self.config.training)

    def apply_gradients(
        self, state: State, batch: GlobalBatch, loss: Array, losses: dict[str, Array], gradients: Tree
    ) -> tuple[State, dict[str, Array]]:
        """See `TrainStep.apply_gradients`; then updates the scale."""
        after, metrics = super().apply_gradients(state, batch, loss, losses, gradients)
        with jax.named_scope("optimizer"):
            scale = update(state.loss_scale, metrics["first_bad"] == ALL_FINITE, self.config.training)
        # The scale of this step, not of the next: `skipped_steps` judges an overflow by it.
        return replace(after, loss_scale=scale), {**metrics, "loss_scale": state.loss_scale.scale}


class NarrowMastersStep(TrainStep):
    """A train step whose master weights have fewer bits than float32."""

    def rescaled(self, updated: Tree, losses: dict[str, Any], state: State) -> Tree:
        """See `TrainStep.rescaled`; rounds the parameters stochastically."""
        updated = super().rescaled(updated, losses, state)
        # By the number of updates, not of steps: skipped steps do not change what later ones draw.
        step, seed = optimizer_step_count(state.optimizer), self.config.training.seed
        return round_masters(updated, self.trainable_records, self.layer_orders, seed, step)


class PredictingStep(TrainStep):
    """A train step of a model that predicts further tokens."""

    def loss_weights(self, batch: GlobalBatch) -> dict[str, Array]:
        """See `TrainStep.loss_weights`; adds those of the predictions, and of their routers."""
        model, samples = self.config.model, len(batch["sample_index"])
        return super().loss_weights(batch) | prediction_weights(model, batch) | prediction_reports(model, samples)

    def gradients(
        self, parameters: Tree, batch: GlobalBatch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """See `TrainStep.gradients`; losses of predictions have no coefficient."""
        loss, losses, gradients = super().gradients(parameters, batch, key, scale)
        return loss, with_predictions(self.config.model, losses), gradients


class RoutedStep(TrainStep):
    """A train step of a model with experts."""

    def loss_weights(self, batch: GlobalBatch) -> dict[str, Array]:
        """See `TrainStep.loss_weights`; adds those of the routers' losses and counters."""
        return super().loss_weights(batch) | report_weights(self.config.model, len(batch["sample_index"]))

    def loss_inputs(self, parameters: Tree, batch: GlobalBatch) -> LossInputs:
        """See `TrainStep.loss_inputs`; the batch has the number of text tokens that routers count."""
        return super().loss_inputs(parameters, with_text_lengths(self.config.model, batch))

    def rescaled(self, updated: Tree, losses: dict[str, Any], state: State) -> Tree:
        """See `TrainStep.rescaled`; updates the routers' biases."""
        updated, model = super().rescaled(updated, losses, state), self.config.model
        if not model.router_bias or model.lora_rank:  # which freezes routers
            return updated
        rate = model.router_bias_update_rate
        return update_router_bias(self.trainable_records, updated, losses[LOAD], rate, self.layer_orders)


class OtherOptimizerStep(TrainStep):
    """A train step whose optimizer keeps other arrays than AdamW's float32 moments."""

    def optimizer_sharding(self) -> Tree:
        """See `TrainStep.optimizer_sharding`."""
        moments = shardings(partition_specs(self.trainable_records, "storage_spec"), self.mesh)
        like = with_sharding(self.optimized(self.abstract_parameters), moments)
        with jax.set_mesh(self.mesh):
            abstract = jax.eval_shape(self.optimizer.init, like)
        return shardings_by_name(abstract, self.trainable_records, optimizer_states(self.config), self.mesh)


class ScheduleFreeStep(TrainStep):
    """A train step whose gradients are taken between the averaged weights, which are stored, and the fast ones."""

    def training_point(self, state: State) -> Tree:
        """See `TrainStep.training_point`."""
        # The optimizer is a chain of clipping and the rule, which is a chain of one.
        point = training_point(self.config.optimizer, self.optimized(state.parameters), state.optimizer[1][0])
        return self.with_optimized(state.parameters, point)
