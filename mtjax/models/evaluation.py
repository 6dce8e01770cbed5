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

    def __init__(self, placed: Any) -> None:
        """Takes a `ShardedModel`, which imports this file."""
        self._placed = placed

    def __call__(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Computes each loss of a batch: its weighted sum, and the sum of the weights."""
        return self._placed.on_mesh(self._compiled, parameters, batch)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program from abstract values."""
        placed = self._placed
        return placed.on_mesh(self._compiled.lower, placed.restore_target, placed.abstract_batch())

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._losses)

    def _losses(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Computes the sum of each loss over a batch, without smoothing, and the sum of its weights: scalars."""
        placed = self._placed
        # The plain cross-entropy, comparable between runs.
        model = placed.trunk_losses(dataclasses.replace(placed.loss_options, label_smoothing=0.0, z_loss=0.0))
        weights, batch = placed.family.loss_weights(batch), with_text_lengths(placed.config.model, batch)
        with use_rules(placed.layout.rules):
            # One microbatch suffices: a forward pass saves no activations.
            inputs, schedule = (batch, weights, None), placed.microbatch_schedule(1)
            sums = distributed_losses(model, parameters, inputs, placed.region, schedule)
            # Sums, which callers add up over batches before they divide.
            return {name: (total, weights[name].sum()) for name, total in sums.items()}
