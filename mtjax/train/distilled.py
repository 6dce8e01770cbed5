"""A train step with knowledge distillation (arXiv 1503.02531): its additional inputs, and the sum of its losses.

The teacher is not part of the step. Its hidden states or outputs come with the batch, and its output table, sharded
like the student's, is the only parameter of it that the step reads.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from mtjax.config import Config
from mtjax.config.sizes import num_outputs, padded_vocab_size
from mtjax.errors import UserError
from mtjax.families.gpt.distilled import DistilledTrunkPipeline
from mtjax.layout.layouts import Layout
from mtjax.models.sharded_model import GlobalBatch
from mtjax.models.teacher import HARD, SOFT, TEACHER, TEACHER_TABLE
from mtjax.sharding.param_specs import first_dimensions, param_specs, partition_specs, shardings, with_sharding
from mtjax.train.step import LossInputs, TrainStep

Tree = Any


class Distilled(TrainStep):
    """The train step of a student on a mesh.

    Raises:
      UserError: the mesh does not divide the model or the batch, or teacher_width is not set.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        super().__init__(config, mesh, layout)
        width, dtype = config.finetuning.teacher_width, jnp.dtype(config.training.compute_dtype)
        self._tables: dict[str, jax.ShapeDtypeStruct] = {}
        if config.model.head == "language":
            if width is None:
                raise UserError(
                    "teacher_width is not set: mtjax finetune reads it from the teacher's weights, and saves it in the "
                    "run's config.toml"
                )
            self._tables[TEACHER_TABLE] = jax.ShapeDtypeStruct((padded_vocab_size(config.model), width), dtype)
        shapes, names = {TEACHER: self._tables}, {TEACHER: dict.fromkeys(self._tables, ("vocab", "embed"))}
        dtypes = config.training.compute_dtype, config.parallel.grad_reduce_dtype
        # The teacher's table has a record, so that ZeRO gathers it as it does the student's; it is not trainable.
        records = param_specs(names, shapes, self.layout, self.mesh_shape, *dtypes, lambda name: False)
        self._region = dataclasses.replace(self.step_region, records={**self.step_region.records, **records})
        self._table_shardings = shardings(partition_specs(records, "storage_spec"), self.mesh)[TEACHER]

    def abstract_step_batch(self, global_batch_size: int | None = None) -> GlobalBatch:
        """Returns the abstract batch of data, the teacher's outputs for it, and the teacher's output table."""
        model = self.config.model
        outputs = {"spans": (model.sequence_length, 2)}.get(model.head, (num_outputs(model),))
        kind = jnp.dtype("float32")
        if (table := self._tables.get(TEACHER_TABLE)) is not None:
            outputs, kind = (model.sequence_length, table.shape[1]), table.dtype
        batch = self.abstract_batch(global_batch_size)
        array = jax.ShapeDtypeStruct((batch["sample_index"].shape[0], *outputs), kind)
        sharding = first_dimensions(self.batch_sharding, array.ndim)
        tables = with_sharding(self._tables, self._table_shardings)
        return {**batch, TEACHER: with_sharding(array, sharding), **tables}

    def loss_weights(self, batch: GlobalBatch) -> dict[str, Array]:
        """Returns the weights of the values of both losses: 1 - teacher_weight of the labels', teacher_weight of the
        teacher's."""
        (weights,), share = super().loss_weights(batch).values(), self.config.finetuning.teacher_weight
        return {HARD: (1 - share) * weights, SOFT: share * weights}

    def gradients(
        self, parameters: Tree, batch: GlobalBatch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """Traces the forward and backward pass as `TrainStep.gradients` does; the two losses by name are unweighted.

        With experts their sum is "loss", which is without the routers' losses.
        """
        loss, losses, gradients = super().gradients(parameters, batch, key, scale)
        share = self.config.finetuning.teacher_weight
        shares = {HARD: 1 - share, SOFT: share}
        # What routers report has the weights of their settings.
        routed = {name: value for name, value in losses.items() if name not in shares}
        of_tokens = {"loss": losses[HARD] + losses[SOFT]} if routed else {}
        # A share of 0 has no loss to report.
        unweighted = {name: losses[name] / share for name, share in shares.items() if share}
        return loss, {**of_tokens, **unweighted, **routed}, gradients

    def loss_inputs(self, parameters: Tree, batch: GlobalBatch) -> LossInputs:
        """Returns the student model, and the teacher's output table if the loss needs it."""
        temperature = self.config.finetuning.teacher_temperature
        options = dataclasses.replace(self.loss_options, temperature=temperature)
        if not self._tables:
            return LossInputs(self.loss_function(options), self.step_region, parameters, batch)
        tables = {name: batch[name] for name in self._tables}
        batch = {name: array for name, array in batch.items() if name not in tables}
        loss_function = DistilledTrunkPipeline(self.model, options, self.sections)
        # Among the parameters, so that ZeRO gathers it and stages have it; no gradient is asked for.
        return LossInputs(loss_function, self._region, {**parameters, TEACHER: tables}, batch)
