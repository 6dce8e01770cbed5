"""The optimizer of the paper (section 4.2): AdamW with gradient clipping, and weight decay of matrices and tables
only."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mtjax.config import Config
from mtjax.layout.layouts import is_decayed
from mtjax.layout.optimizer_states import optimizer_states
from mtjax.layout.stages import PLAIN, Orders
from mtjax.train.learning_rate import make_learning_rate


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
            make_learning_rate(options, steps),
            b1=options.beta1,
            b2=options.beta2,
            eps=options.epsilon,
            # Biases and norms are not decayed.
            mask=jax.tree.map(lambda record: is_decayed(record.axes), records),
        )
    else:
        from mtjax.train.optimizers import make_rule

        build = partial(make_rule, config, records, orders)
    if options.start_weight_decay is None:
        rule = build(weight_decay=options.weight_decay)
    else:
        from mtjax.train.weight_decay import with_weight_decay

        rule = with_weight_decay(build, options, steps)
    if config.finetuning.layer_decay == 1.0:
        return optax.chain(clip, rule)
    from mtjax.train.layer_decay import layer_decay

    # Behind the rule: Adam's updates do not depend on the scale of its gradients.
    return optax.chain(clip, rule, layer_decay(config, records, orders))


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Builds a scaling of gradients to a global norm of at most `max_norm`; their norm may be given to `update`."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Any = None, **_: Any) -> tuple[Any, Any]:
        # XLA: optax's own clipping divides each gradient, which is not fused into the three updates that read it, so
        # all clipped gradients would be written to memory. A multiplication by one factor is recomputed in each fusion.
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) if norm is None else norm))
        return jax.tree.map(lambda gradient: gradient * factor, updates), state

    return optax.GradientTransformationExtraArgs(optax.identity().init, update)
