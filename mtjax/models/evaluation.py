"""The losses of a model on a mesh without dropout."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
from jax import Array

from mtjax.models.routers import with_text_lengths
from mtjax.sharding.axes import use_rules
from mtjax.sharding.distributed_output import distributed_losses

Tree = Any
Batch = dict[str, Any]


class Evaluation:
    """Computes losses of a model, by one program for all batches of a size."""

    def __init__(self, sharded_model: Any) -> None:
        """Takes a `ShardedModel`, which imports this file."""
        self._sharded_model = sharded_model

    def __call__(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Computes each loss of a batch: its weighted sum, and the sum of the weights."""
        return self._sharded_model.on_mesh(self._compiled, parameters, batch)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program from abstract values."""
        sharded_model = self._sharded_model
        return sharded_model.on_mesh(self._compiled.lower, sharded_model.restore_target, sharded_model.abstract_batch())

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._losses)

    def _losses(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Computes the sum of each loss over a batch, without smoothing, and the sum of its weights: scalars."""
        sharded_model = self._sharded_model
        # The plain cross-entropy, comparable between runs.
        options = dataclasses.replace(sharded_model.loss_options, label_smoothing=0.0, z_loss=0.0)
        loss_function = sharded_model.loss_function(options)
        weights, batch = (
            sharded_model.model_class.loss_weights(batch),
            with_text_lengths(sharded_model.config.model, batch),
        )
        with use_rules(sharded_model.layout.rules):
            # One microbatch suffices: a forward pass saves no activations.
            inputs, schedule = (batch, weights, None), sharded_model.microbatch_schedule(1)
            sums = distributed_losses(loss_function, parameters, inputs, sharded_model.region, schedule)
            # Sums, which callers add up over batches before they divide.
            return {name: (total, weights[name].sum()) for name, total in sums.items()}
