"""Weight decay that grows over a run, as in Megatron's `OptimizerParamScheduler`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from mtjax.config import Optimizer
from mtjax.train.optimizer import DECAYS


def make_weight_decay(options: Optimizer, steps: int) -> float | optax.Schedule:
    """Builds the weight decay: a number, or a schedule of the step, counted from 0, if it grows over the run's
    `steps`."""
    end, start = options.weight_decay, options.start_weight_decay
    if start is None or options.weight_decay_style == "constant":
        return end
    left = DECAYS[options.weight_decay_style]
    return lambda step: end - (end - start) * left(jnp.clip(jnp.asarray(step, jnp.float32) / steps, 0, 1))


def with_weight_decay(
    build: Callable[..., optax.GradientTransformation], options: Optimizer, steps: int
) -> optax.GradientTransformation:
    """Builds an optimizer with its weight decay, which may depend on the step."""
    decay = make_weight_decay(options, steps)
    if not callable(decay):
        return build(weight_decay=decay)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Uses the learning rate's counter, which the chain's last state has. optax also takes a schedule, but adds a
        # counter to the state: checkpoints with and without a growing weight decay would differ in structure.
        return build(weight_decay=decay(state[-1].count)).update(updates, state, params)

    return optax.GradientTransformation(build(weight_decay=0.0).init, update)
