"""Layer-wise learning rate decay, for finetuning."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mtjax.config import Config, Model
from mtjax.layout.stages import Orders, layer_numbers, order_of
from mtjax.sharding.param_specs import ParamSpec


def layer_decay(config: Config, records: Any, orders: Orders) -> optax.GradientTransformation:
    """Scales the updates of parameters, `records` of them, by their layers' factors."""
    decay, model = config.finetuning.layer_decay, config.model
    factors = jax.tree.map(lambda record: layer_factors(record, decay, model, orders), records)
    return optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, factors))


def layer_factors(record: ParamSpec, decay: float, model: Model, orders: Orders) -> np.ndarray:
    """Computes the learning rate of a parameter relative to the head's: `decay^(L - l)` in layer l of 0 ... L - 1, and
    `decay^(L + 1)` below the layers, as in ELECTRA and BEiT finetuning.

    The final norm has the rate of the head.
    """
    num_layers = model.num_layers
    if not record.is_stacked:
        is_below = record.name.startswith(BELOW)
        return np.asarray(decay ** (num_layers + 1) if is_below else 1.0, np.float32)
    # Rows are in the order of the stages; factors follow the layers' numbers in the model.
    order = order_of(record.name, orders)
    layers = np.asarray(layer_numbers(model, record.name))
    numbers = layers if order is None else layers[np.maximum(order.flat, 0)]  # padding rows take any factor
    return (decay ** (num_layers - numbers)).astype(np.float32).reshape(-1, *(1,) * (len(record.shape) - 1))


BELOW = ("embedding", "positions", "token_types", "project_in")
"""Prefixes of the names of parameters below the layers."""
