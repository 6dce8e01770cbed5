"""The optimizer of the paper (section 4.2): AdamW with gradient clipping, and weight decay of matrices and tables
only."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mtjax.config import Config
from mtjax.layout.layouts import is_decayed
from mtjax.layout.optimizer_states import optimizer_states
from mtjax.layout.stages import PLAIN, Orders
from mtjax.train.schedule import make_schedule, make_weight_decay


def make_optimizer(config: Config, records: Any, orders: Orders = PLAIN) -> optax.GradientTransformationExtraArgs:
    """Builds global-norm clipping followed by the optimizer, with layer-wise learning rate decay if the config sets it.

    Args:
      config: rates, decay and clipping.
      records: `ParamSpec` of every parameter, in a tree like theirs.
      orders: order of layers in stacked parameters.
    """
    options, steps = config.optimizer, config.training.steps
    clip = _clip(options.clip_grad_norm) if options.clip_grad_norm else optax.identity()
    if optimizer_states(config).is_plain:
        build = partial(
            optax.adamw,
            make_schedule(options, steps),
            b1=options.beta1,
            b2=options.beta2,
            eps=options.epsilon,
            # Biases and norms are not decayed.
            mask=jax.tree.map(lambda record: is_decayed(record.axes), records),
        )
    else:
        from mtjax.train.optimizers import make_rule

        build = partial(make_rule, config, records, orders)
    decay = make_weight_decay(options, steps)
    rule = _growing(build, decay) if callable(decay) else build(weight_decay=decay)
    factor = config.finetuning.layer_decay
    if factor == 1.0:
        return optax.chain(clip, rule)
    from mtjax.train.layer_decay import layer_factors

    # Behind the rule: Adam's updates do not depend on the scale of its gradients.
    factors = jax.tree.map(lambda record: layer_factors(record, factor, config.model, orders), records)
    layer_decay = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))
    return optax.chain(clip, rule, layer_decay)


def _growing(build: Callable[..., optax.GradientTransformation], decay: optax.Schedule) -> optax.GradientTransformation:
    """Builds an optimizer with a weight decay that depends on the step.

    optax supports a schedule too, but adds a counter to the state. This reads the learning rate's counter instead, so
    that a checkpoint has the same structure with and without a growing weight decay.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return build(weight_decay=decay(state[-1].count)).update(updates, state, params)

    return optax.GradientTransformation(build(weight_decay=0.0).init, update)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Builds a scaling of gradients to a global norm of at most `max_norm`; their norm may be given to `update`."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        # XLA: optax's own clipping divides each gradient, which is not fused into the three updates that read it, so
        # all clipped gradients would be written to memory. A multiplication by one factor is recomputed in each fusion.
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) if norm is None else norm))
        return jax.tree.map(lambda gradient: gradient * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)
