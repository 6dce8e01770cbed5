"""Gradients of a data-parallel step: local over all microbatches, then one reduction over `data` in float32.

`data` is manual here and `model` stays explicit. Were both explicit, XLA would reduce each layer's gradients in the
compute type once per microbatch, inside the backward loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, auto_axes, explicit_axes

from mtjax.sharding import axes
from mtjax.sharding.axes import DATA, MODEL

Tree = Any
LossSum = Callable[[Tree, Tree], tuple[jax.Array, Tree]]
"""(parameters, microbatch) -> the weighted sum of its losses, and a tree of scalars to report beside it."""


def data_parallel_gradients(
    loss_sum: LossSum, parameters: Tree, batch: Tree, parameter_specs: Tree, num_microbatches: int
) -> tuple[jax.Array, Tree, Tree]:
    """Loss and gradients of a global batch.

    Args:
      loss_sum: differentiated; its weights already divide by the global number of tokens, so sums are means.
      parameters: any tree, the same on every data rank.
      batch: arrays [global_batch_size, ...], split over `data` along their first dimension.
      parameter_specs: the parameters' partition specs.
      num_microbatches: pieces that each data rank works through one after the other.

    Returns:
      The loss, a float32 scalar; what is reported beside it, summed; and float32 gradients placed like the parameters.
    """

    def local(parameters: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
        # Varying parameters keep autodiff from summing each cotangent over `data` on its own.
        parameters = jax.tree.map(_vary, parameters)
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), parameters)

        def accumulate(total: tuple[jax.Array, Tree], microbatch: Tree) -> tuple[tuple[jax.Array, Tree], Tree]:
            (loss, parts), gradients = jax.value_and_grad(loss_sum, has_aux=True)(parameters, microbatch)
            add = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total[1], gradients)
            return (total[0] + loss, add), parts

        (loss, gradients), parts = lax.scan(accumulate, (_vary(jnp.zeros(())), zeros), microbatches)
        with jax.named_scope("gradients"):
            loss, parts = lax.psum((loss, jax.tree.map(lambda part: part.sum(0), parts)), DATA)
            return loss, parts, _sum_over_data(gradients, parameter_specs)

    whole = PartitionSpec()
    return _map_over_data(local, parameters, batch, parameter_specs, (whole, whole, parameter_specs))


def data_parallel_sum(
    function: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, parameter_specs: Tree
) -> Tree:
    """The scalars that `function` returns, summed over the data ranks' shares of `batch`; nothing is differentiated."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        return lax.psum(function(parameters, batch), DATA)

    return _map_over_data(local, parameters, batch, parameter_specs, PartitionSpec())


def _map_over_data(
    local: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, parameter_specs: Tree, result_specs: Tree
) -> Tree:
    """Runs `local` on every data rank: whole parameters, its own part of the batch, `model` explicit inside.

    At the border of the map `model` is automatic: were it explicit there, jax would take each parameter for whole on
    every model rank and gather it on the way in, and its gradient on the way out - with the right numbers.
    """
    batch_specs = jax.tree.map(lambda a: PartitionSpec(*(None for _ in a.shape)), batch)
    inside = explicit_axes(local, axes=(MODEL,), in_sharding=(parameter_specs, batch_specs))
    mapped = jax.shard_map(
        inside, axis_names={DATA}, in_specs=(PartitionSpec(), PartitionSpec(DATA)), out_specs=PartitionSpec()
    )
    return auto_axes(axes=(MODEL,), out_sharding=result_specs)(mapped)(parameters, batch)


def _sum_over_data(gradients: Tree, specs: Tree) -> Tree:
    """The reduction proper, in a nested map where every axis is manual: with an axis left explicit it won't lower."""
    rest = set(axes.explicit_axes())
    return jax.shard_map(lambda g: lax.psum(g, DATA), axis_names=rest, in_specs=(specs,), out_specs=specs)(gradients)


def _vary(x: jax.Array) -> jax.Array:
    return lax.pcast(x, (DATA,), to="varying")
