"""The hidden states after the last layer, for evaluation, teachers and other heads."""

import dataclasses
from functools import partial
from typing import Any

from jax import Array

from mtjax.models.language_model import HiddenStates, run_sections
from mtjax.models.layer_context import RESIDUAL
from mtjax.models.routers import with_text_lengths
from mtjax.models.sharded_model import GlobalBatch, ShardedModel
from mtjax.sharding.axes import current_rules, partition_spec
from mtjax.sharding.distributed_output import by_microbatches, distributed_output

Tree = Any


def final_hidden_states(
    sharded_model: ShardedModel, parameters: Tree, batch: GlobalBatch, microbatches: int | None = None
) -> Array:
    """Computes the hidden states after the last layer, by the rules in force, without dropout; call it in a trace.

    Args:
      sharded_model: the model.
      parameters: sharded as `storage_spec`.
      batch: arrays [batch, ...].
      microbatches: into which each rank divides its samples; None runs the batch outside the manual region, unless
        pipeline or context parallelism needs the region.

    Returns:
      [batch, act_seq, embed].
    """
    rules, batch = current_rules(), with_text_lengths(sharded_model.config.model, batch)
    if sharded_model.stages == 1 and not rules.seq and microbatches is None:
        return run_sections(sharded_model.inference_model(parameters), batch, None)[0].x
    count, region = microbatches or 1, dataclasses.replace(sharded_model.region, rules=rules)
    specs: Any = HiddenStates(partition_spec(rules, RESIDUAL))  # pyright: ignore[reportArgumentType]
    if sharded_model.stages == 1:
        run = lambda parameters, batch: run_sections(sharded_model.model(parameters), batch, None)[0]  # noqa: E731
        return distributed_output(by_microbatches(run, count), parameters, batch, region, specs).x
    schedule: Any = sharded_model.microbatch_schedule(count)
    run_stages = partial(schedule.final_boundary, sharded_model.trunk_losses(sharded_model.loss_options))
    return distributed_output(run_stages, parameters, (batch, {}, None), region, specs).x
