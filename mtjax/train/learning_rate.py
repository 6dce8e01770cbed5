"""Learning rate schedules, as in Megatron's `OptimizerParamScheduler`.

Megatron counts samples; each step has the same number of samples, so ratios of samples equal ratios of steps. Update k,
counted from 0, uses the value at k.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax

from mtjax.config import Optimizer

Ratio = jax.Array
"""Fraction of a phase that is over, 0 to 1."""


def _linear(ratio: Ratio) -> jax.Array:
    return 1.0 - ratio


def _cosine(ratio: Ratio) -> jax.Array:
    return (1.0 + jnp.cos(jnp.pi * ratio)) / 2


DECAYS: Mapping[str, Callable[[Ratio], jax.Array]] = {
    "constant": jnp.ones_like,
    "linear": _linear,
    "cosine": _cosine,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - jnp.sqrt(ratio),
}
"""Shape of a decay from 1 to 0, as a function of the fraction of its steps that is over."""


def make_learning_rate(options: Optimizer, steps: int) -> optax.Schedule:
    """Builds the learning rate schedule, a function of the step, counted from 0.

    Step k of the warmup has `initial + (peak - initial) k / warmup_steps`: without an initial rate the first update
    changes only Adam's moments, as in Megatron. After `decay_steps` every style but constant is at the minimum. In a
    run that is no longer than its warmup, the rate rises to the end.
    """
    peak, initial, warmup = options.learning_rate, options.initial_learning_rate, options.warmup_steps
    last = max(options.decay_steps or steps, warmup + 1)
    decayed = _decayed(options, last)

    # Each phase is computed for every k and selected with `where`, since k is traced.
    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        k = jnp.asarray(step, jnp.float32)
        ended = peak if options.decay_style == "constant" else options.min_learning_rate
        after = jnp.where(k > last, ended, decayed(k))
        return jnp.where(k <= warmup, initial + (peak - initial) * k / warmup, after) if warmup else after

    return rate


def _decayed(options: Optimizer, last: int) -> Callable[[jax.Array], jax.Array]:
    """Builds the schedule between the end of the warmup and step `last`."""
    peak, floor, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    if options.decay_style == "inverse-square-root":
        return lambda k: jnp.maximum(floor, peak * (warmup / jnp.maximum(k, 1)) ** 0.5)  # peak x sqrt(warmup / k)
    first, style = warmup, options.decay_style
    if options.decay_style == "WSD":
        assert options.wsd_decay_steps is not None  # the config is checked
        first, style = last - options.wsd_decay_steps, options.wsd_decay_style
    return lambda k: floor + (peak - floor) * DECAYS[style](jnp.clip((k - first) / (last - first), 0, 1))
