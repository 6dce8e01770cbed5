"""Updates the biases of routers, which balance the load of experts without a loss (arXiv 2408.15664)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard

from mtjax.layout.stages import PADDING, LayerOrder, Orders, order_of
from mtjax.models.prediction import prediction_number
from mtjax.models.routers import ROUTER_BIAS
from mtjax.sharding.param_specs import ParamSpec

Tree = Any


def update_router_bias(records: Tree, parameters: Tree, load: Array, rate: float, orders: Orders) -> Tree:
    """Updates each router's biases by its experts' load, [layers, experts] tokens (arXiv 2408.15664).

    Their gradients are 0, so the optimizer does not change them. `orders` gives the order in which layers are stacked.
    """
    # The rows of multi-token prediction follow those of the stacks.
    predictors = max(prediction_number(record.name) for record in jax.tree.leaves(records))
    # sign(mean load - load): +1 for experts below the mean load, -1 above.
    below = jnp.sign(load.sum(-1, keepdims=True) - load.shape[-1] * load)

    def one(record: ParamSpec, value: Array) -> Array:
        if not record.name.endswith(ROUTER_BIAS):
            return value
        if number := prediction_number(record.name):
            # From the end: the last `predictors` rows, in the order of the predictions.
            return value + reshard(rate * below[number - 1 - predictors], record.storage_spec)
        order, of_stack = order_of(record.name, orders), below[: len(below) - predictors] if predictors else below
        signs = of_stack if order is None else to_stacked_order(of_stack, order)
        return value + reshard(rate * signs, record.storage_spec)

    return jax.tree.map(one, records, parameters)


def to_stacked_order(rows: Array, order: LayerOrder) -> Array:
    """Reorders rows of layers into the order in which parameters are stacked; zeros where a stage has no layer."""
    # An index past the end reads the fill value: the slot of a stage without a layer.
    indices = jnp.asarray([len(rows) if number == PADDING else number for number in order.flat])
    return rows.at[indices].get(mode="fill", fill_value=0)
