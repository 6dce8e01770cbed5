"""Loss scaling for float16, in which small gradients underflow and large ones overflow.

The loss is multiplied by a scale before it is differentiated, and gradients are divided by it afterwards, in float32.
The dynamic scale follows Megatron-LM's DynamicGradScaler (megatron/core/optimizer/grad_scaler.py).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.config import Training

GROWTH = 2.0
BACKOFF = 0.5


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "growth", "hysteresis"], meta_fields=[])
@dataclass(frozen=True)
class LossScale:
    """The loss scale of the next step, and its counters."""

    scale: Any
    """float32 scalar."""
    growth: Any
    """Steps without overflow since the last overflow or growth, int32."""
    hysteresis: Any
    """Remaining overflows until the scale shrinks, int32; at 0 and below every overflow shrinks it."""


def initial(options: Training) -> LossScale:
    """Returns the scale of the first step."""
    scale = options.initial_loss_scale if options.loss_scale is None else options.loss_scale
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(options.hysteresis))


def update(state: LossScale, finite: Array, options: Training) -> LossScale:
    """Returns the scale after a step whose gradients were all `finite`, a bool scalar, or not; a static scale stays."""
    if options.loss_scale is not None:
        return state
    # Overflow: the scale is halved once `hysteresis` overflows have occurred, and the growth counter restarts.
    remaining = state.hysteresis - 1
    smaller = jnp.maximum(state.scale * BACKOFF, options.min_loss_scale)
    overflowed = LossScale(jnp.where(remaining <= 0, smaller, state.scale), jnp.zeros_like(state.growth), remaining)
    # No overflow: after `loss_scale_window` such steps in a row the scale doubles, and the hysteresis is reset.
    growth = state.growth + 1
    # Not only where they are equal: a resumed run may have a shorter window, which the counter has passed.
    grows = growth >= options.loss_scale_window
    good = LossScale(
        jnp.where(grows, state.scale * GROWTH, state.scale),
        jnp.where(grows, 0, growth),
        jnp.where(grows, options.hysteresis, state.hysteresis),
    )
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), good, overflowed)
