"""The hidden states after the last layer, for evaluation, teachers and other heads."""

import dataclasses
from typing import Any

from jax import Array

from mtjax.models.language_model import HiddenStates, run_sections
from mtjax.models.layer_context import RESIDUAL
from mtjax.models.routers import with_text_lengths
from mtjax.models.sharded_model import Batch, ShardedModel
from mtjax.sharding.axes import current_rules, partition_spec
from mtjax.sharding.distributed_output import distributed_output

Tree = Any


def final_hidden_states(placed: ShardedModel, parameters: Tree, batch: Batch, microbatches: int | None = None) -> Array:
    """Computes the hidden states after the last layer, by the rules in force, without dropout; call it in a trace.

    Args:
      placed: the model.
      parameters: sharded as `storage_spec`.
      batch: arrays [batch, ...].
      microbatches: into which each rank divides its samples; None runs the batch outside the manual region, unless
        pipeline or context parallelism needs the region.

    Returns:
      [batch, act_seq, embed].
    """
    rules, schedule = current_rules(), placed.microbatch_schedule(microbatches or 1)
    region, batch = dataclasses.replace(placed.region, rules=rules), with_text_lengths(placed.config.model, batch)
    if placed.stages > 1 or rules.seq or microbatches is not None:
        specs: Any = HiddenStates(partition_spec(rules, RESIDUAL))  # pyright: ignore[reportArgumentType]
        inputs = (batch, {}, None)
        return distributed_output(
            placed.trunk_losses(placed.loss_options), parameters, inputs, region, schedule, specs
        ).x
    return run_sections(placed.inference_model(parameters), batch, None)[0].x
