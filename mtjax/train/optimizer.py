"""The paper's optimizer (section 4.2): clipped AdamW, decay on matrices only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mtjax.config import Config
from mtjax.train.schedule import make_schedule, make_weight_decay


def make_optimizer(config: Config, records: Any) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW.

    Args:
      config: rates, decay and clipping.
      records: of every parameter, in a tree like theirs.
    """
    options, steps = config.optimizer, config.training.steps
    clip = optax.stateless(partial(_clipped, options.clip_grad_norm)) if options.clip_grad_norm else optax.identity()
    adamw = partial(
        optax.adamw,
        make_schedule(options, steps),
        b1=options.beta1,
        b2=options.beta2,
        eps=options.epsilon,
        mask=jax.tree.map(lambda record: record.is_matrix, records),
    )
    decay = make_weight_decay(options, steps)
    return optax.chain(clip, _growing(adamw, decay) if callable(decay) else adamw(weight_decay=decay))


def _growing(adamw: Callable[..., optax.GradientTransformation], decay: optax.Schedule) -> optax.GradientTransformation:
    """AdamW whose weight decay depends on the step.

    optax takes a schedule too, and adds a counter to the state. This reads Adam's counter, so that a checkpoint has the
    same form whether the decay grows or not.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return adamw(weight_decay=decay(state[0].count)).update(updates, state, params)

    return optax.GradientTransformation(adamw(weight_decay=0.0).init, update)


def _clipped(max_norm: float, gradients: Any, _: Any) -> Any:
    """Gradients of a global norm of at most `max_norm`.

    All are multiplied by one factor, as the updates read them; optax's own clipping divides, and XLA would not repeat a
    division in each of the three updates: it would write all clipped gradients out.
    """
    factor = jnp.minimum(1.0, max_norm / optax.tree.norm(gradients))
    return jax.tree.map(lambda gradient: gradient * factor, gradients)
