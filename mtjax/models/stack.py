"""Stacks of layers: parameters along `layers`, and one program for all of them."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.models.context import Context
from mtjax.models.layer import Layer
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import Recompute, scan_layers
from mtjax.sharding.parameters import materialize


class Stack(nnx.Module):
    """`num_layers` layers of one kind, whose parameters are stacked along `layers`."""

    def __init__(
        self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, recompute: Recompute, key: Array
    ) -> None:
        keys = jax.random.split(key, model.num_layers)
        self.layers = jax.vmap(lambda key: Layer(model, dtype, kind=kind, key=key))(keys)
        self.num_layers = model.num_layers
        self.recompute = recompute

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: Context, states: State = None
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Runs all layers; states, stacked along `layers`, go in and out as in `run_layers`."""
        return run_layers(self.layers, jnp.arange(self.num_layers), x, context, self.recompute, states)


def run_layers(
    layers: Layer,
    numbers: Int[Array, " layers"],
    x: Float[Array, "batch act_seq embed"],
    context: Context,
    recompute: Recompute,
    states: State = None,
) -> tuple[Float[Array, "batch act_seq embed"], State]:
    """Runs some layers of a stack, one after the other.

    Args:
      layers: their parameters, stacked.
      numbers: the layers' numbers in the entire stack; a layer derives its dropout keys from the context's and its own.
      x: the residual stream.
      context: what every layer reads besides it.
      recompute: what each layer saves for its backward pass.
      states: the layers' states, each array stacked along `layers`; None in training.

    Returns:
      The residual stream, and the layers' new states, stacked likewise; None where no layer has any.
    """

    def run(x: Array, layer: Layer, number: Array, state: State) -> tuple[Array, State]:
        layer, keys = materialize(layer), context.dropout_keys
        own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
        return layer(x, dataclasses.replace(context, dropout_keys=own), state)

    with jax.named_scope("layers"):
        return scan_layers(run, x, layers, numbers, recompute, states)
