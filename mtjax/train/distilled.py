"""A step that learns from a teacher too (arXiv 1503.02531): what it reads besides the data, and the mix of its losses.

The teacher itself is not part of the step. Its hidden states or outputs come with the batch, and of its parameters the
step reads the output table alone, split over the mesh like the student's.
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
from mtjax.models.pipeline_model import DistilledTrunkPipeline
from mtjax.models.sharded_model import Batch
from mtjax.models.trunk import HARD, SOFT, TEACHER, TEACHER_TABLE
from mtjax.sharding import placement
from mtjax.sharding.param_specs import param_specs, partition_specs
from mtjax.theory.layout import Layout
from mtjax.train.step import LossInputs, TrainStep

Tree = Any


class Distilled(TrainStep):
    """A student on a mesh.

    Raises:
      UserError: model or batch don't divide over the mesh, or the config does not say how wide the teacher is.
    """

    def __init__(self, config: Config, mesh: Mesh, layout: Layout | None = None) -> None:
        super().__init__(config, mesh, layout)
        width, dtype = config.finetuning.teacher_width, jnp.dtype(config.training.compute_dtype)
        self._tables: dict[str, jax.ShapeDtypeStruct] = {}
        if config.model.head == "language":
            if width is None:
                raise UserError(
                    "teacher_width is missing: mtjax finetune reads it off the teacher's weights, and writes it to the "
                    "config.toml of the run"
                )
            self._tables[TEACHER_TABLE] = jax.ShapeDtypeStruct((padded_vocab_size(config.model), width), dtype)
        shapes, names = {TEACHER: self._tables}, {TEACHER: dict.fromkeys(self._tables, ("vocab", "embed"))}
        wires = config.training.compute_dtype, config.parallel.grad_reduce_dtype
        records = param_specs(names, shapes, self.layout, self.shape, *wires, lambda name: False)
        self._region = dataclasses.replace(self.region, records={**self.records, **records})
        self._table_places = placement.shardings(partition_specs(records, "storage_spec"), self.mesh)[TEACHER]

    def abstract_step_batch(self, global_batch_size: int | None = None) -> Batch:
        """A batch of the data, what the teacher makes of it, and its output table."""
        model = self.config.model
        outputs = {"spans": (model.sequence_length, 2)}.get(model.head, (num_outputs(model),))
        kind = jnp.dtype("float32")
        if (table := self._tables.get(TEACHER_TABLE)) is not None:
            outputs, kind = (model.sequence_length, table.shape[1]), table.dtype
        batch = self.abstract_batch(global_batch_size)
        array = jax.ShapeDtypeStruct((batch["sample_index"].shape[0], *outputs), kind)
        place = placement.of_dimensions(self.batch_sharding, array.ndim)
        tables = placement.with_sharding(self._tables, self._table_places)
        return {**batch, TEACHER: placement.with_sharding(array, place), **tables}

    def loss_weights(self, batch: Batch) -> dict[str, Array]:
        """Each value of the two losses weighs its share of what the one would."""
        (weights,), share = super().loss_weights(batch).values(), self.config.finetuning.teacher_weight
        return {HARD: (1 - share) * weights, SOFT: share * weights}

    def gradients(
        self, parameters: Tree, batch: Batch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Array], Tree]:
        """As `Program.gradients` says; the two losses, by name, are those before they are mixed."""
        loss, parts, gradients = super().gradients(parameters, batch, key, scale)
        share = self.config.finetuning.teacher_weight
        shares = {HARD: 1 - share, SOFT: share}
        return loss, {name: value / shares[name] for name, value in parts.items() if shares[name]}, gradients

    def loss_inputs(self, parameters: Tree, batch: Batch) -> LossInputs:
        """The student, beside the teacher's output table where the losses read one."""
        temperature = self.config.finetuning.teacher_temperature
        options = dataclasses.replace(self.loss_options, temperature=temperature)
        if not self._tables:
            return LossInputs(self.pipeline_model(options), self.region, parameters, batch)
        tables = {name: batch[name] for name in self._tables}
        rest = {name: array for name, array in batch.items() if name not in tables}
        model = DistilledTrunkPipeline(lambda tree: self.model(_students(tree)), options, self.sections)
        return LossInputs(model, self._region, {**parameters, TEACHER: tables}, rest)


def _students(parameters: Tree) -> Tree:
    return {name: below for name, below in parameters.items() if name != TEACHER}
