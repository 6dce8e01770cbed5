"""The paper's optimizer (section 4.2): clipped AdamW, decay on matrices only, linear warmup and cosine to a floor."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mtjax.config import Config, Optimizer


def make_optimizer(config: Config, records: Any) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW.

    Args:
      config: rates, decay and clipping.
      records: of every parameter, in a tree like theirs.
    """
    options = config.optimizer
    clip = optax.stateless(partial(_clipped, options.clip_grad_norm)) if options.clip_grad_norm else optax.identity()
    adamw = optax.adamw(
        make_schedule(options, config.training.steps),
        b1=options.beta1,
        b2=options.beta2,
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        mask=jax.tree.map(lambda record: record.is_matrix, records),
    )
    return optax.chain(clip, adamw)


def _clipped(max_norm: float, gradients: Any, _: Any) -> Any:
    """Gradients of a global norm of at most `max_norm`.

    By one factor, which the updates multiply by as they read a gradient; optax's own divides, and XLA would not repeat
    a division in each of the three updates: it writes all clipped gradients out.
    """
    factor = jnp.minimum(1.0, max_norm / optax.tree.norm(gradients))
    return jax.tree.map(lambda gradient: gradient * factor, gradients)


def make_schedule(options: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate of each step, counted from 0.

    Step k of the warmup has `peak (k + 1) / warmup_steps` (Megatron counts so too: the first step is not lost), then a
    cosine reaches the floor at `decay_steps` and stays there.
    """
    peak, floor, warmup = options.learning_rate, options.min_learning_rate, options.warmup_steps
    last = max(options.decay_steps or steps, warmup + 1)
    cosine = optax.cosine_decay_schedule(peak, last - warmup, alpha=floor / peak if peak else 0.0)
    if not warmup:
        return cosine
    climb = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([climb, cosine], [warmup])
