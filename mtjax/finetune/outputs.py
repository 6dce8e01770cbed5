"""Runs a finetuned model on rows, batch by batch, and returns its logits or values."""

from functools import cached_property
from typing import Any, cast

import jax
import numpy as np
from jax import Array

from mtjax.data.samples.sample import Dataset, stack
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.models.finetuned import GivesOutputs
from mtjax.models.language_model import HiddenStates
from mtjax.models.sharded_model import ShardedModel, Tree
from mtjax.sharding.axes import use_rules
from mtjax.sharding.global_batch import global_batch, process_rows
from mtjax.sharding.param_specs import replicated


class Outputs:
    """Runs a model without dropout, one global batch at a time."""

    def __init__(self, sharded_model: ShardedModel) -> None:
        self.sharded_model, self.batch = sharded_model, sharded_model.config.training.global_batch_size
        self._mine = process_rows(sharded_model.batch_sharding, self.batch)

    def compute(self, parameters: Tree, samples: Dataset) -> np.ndarray:
        """Returns float32 logits or values [rows, outputs]; for spans [rows, sequence, 2]."""
        # sample_index only selects dropout masks.
        names, batches = [name for name in self.sharded_model.batch_names if name != "sample_index"], []
        for start in range(0, len(samples), self.batch):
            numbers = np.minimum(start + self._mine, len(samples) - 1)  # pads the last batch with the last row
            local = stack([samples[int(number)] for number in numbers])
            batch = global_batch(self.sharded_model.batch_sharding, {name: local[name] for name in names}, self.batch)
            batches.append(np.asarray(self.sharded_model.on_mesh(self._compiled, parameters, batch)))
        return np.concatenate(batches)[: len(samples)]

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._outputs, out_shardings=replicated(self.sharded_model.mesh))

    def _outputs(self, parameters: Tree, batch: dict[str, Array]) -> Array:
        with use_rules(self.sharded_model.layout.rules):
            model = cast(GivesOutputs, self.sharded_model.inference_model(parameters))
            return model.outputs(HiddenStates(final_hidden_states(self.sharded_model, parameters, batch)), batch)
