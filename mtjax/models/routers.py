"""What routers of experts read of padding and report, and how it enters a step's losses."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from mtjax.config import Model
from mtjax.models.layer_context import PADDING_MASK, TEXT_LENGTH

ROUTER_AUX_LOSS, Z_LOSS, LOAD, LOST = "router_aux_loss", "router_z_loss", "expert_load", "lost_choices"
"""Losses and counters of routers, by their names in a step's metrics."""
REPORTED = (ROUTER_AUX_LOSS, Z_LOSS, LOAD, LOST)
COUNTS = (LOAD, LOST)
"""Those that are counters, of each layer separately."""

ROUTER_BIAS = "experts.router.bias"
"""Suffix of the names of routers' biases."""


def router_reports(states: list[Any]) -> dict[str, Array]:
    """Combines the reports of all routers.

    Args:
      states: of each stack's layers, stacked.

    Returns:
      By name, losses summed over layers, [batch], and counters, [batch, layers] or [batch, layers, routes]; {} without
      experts.
    """
    reports = [state["experts"] for state in states if state is not None and "experts" in state]
    if not reports:
        return {}
    joined = {name: jnp.concatenate([report[name] for report in reports]) for name in reports[0]}
    return {name: jnp.moveaxis(a, 0, 1) if name in COUNTS else a.sum(0) for name, a in joined.items()}


def report_weights(model: Model, num_samples: int) -> dict[str, Array]:
    """Returns the weights of routers' losses and counters in a step.

    Returns:
      By name, float32 [batch]: the losses with a weight in the settings, and the counters; {} without experts.
    """
    if not model.num_experts:
        return {}
    # Counters are sums over samples; losses are means.
    each = jnp.ones(num_samples, jnp.float32)
    counts = dict.fromkeys(COUNTS if model.capacity_factor else (LOAD,), each)
    losses = {ROUTER_AUX_LOSS: model.router_aux_loss, Z_LOSS: model.router_z_loss}
    return {name: each * (weight / num_samples) for name, weight in losses.items() if weight} | counts


class Padding(NamedTuple):
    """Which tokens of samples are text, and how many."""

    is_text: Bool[Array, "batch seq"]
    length: Int[Array, " batch"]
    """Text tokens of each sample; with context parallelism, those of all ranks."""

    @classmethod
    def of(cls, batch: Mapping[str, Array]) -> "Padding | None":
        """Returns the padding of a batch; None unless `with_text_lengths` has counted its text."""
        if TEXT_LENGTH not in batch:
            return None
        return cls(batch[PADDING_MASK] > 0, batch[TEXT_LENGTH])


def with_text_lengths(model: Model, batch: Mapping[str, Array]) -> dict[str, Array]:
    """Adds the text lengths of samples to a batch with a padding mask, for models whose routers need them."""
    # Called outside the manual region: there a row is an entire sample also with context parallelism, and the sum is
    # one small reduction per step instead of one per layer.
    if not model.num_experts or PADDING_MASK not in batch:
        return dict(batch)
    return {**batch, TEXT_LENGTH: batch[PADDING_MASK].sum(1)}
