"""Gradients of a data-parallel step: local over all microbatches, then one reduction over `data` in float32.

`data` is manual here and `model` stays explicit. Were both explicit, XLA would reduce each layer's gradients in the
compute type once per microbatch, inside the backward loop. Where that is wanted - with a single microbatch, so that the
rest of the backward pass hides it, and with ZeRO-2 and 3 - `ParameterLayout.wrap` says so, in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec, auto_axes, explicit_axes, reshard

from mtjax.sharding.axes import sum_ranks, varying_like
from mtjax.sharding.parameters import differentiable, with_parts, zeros_like_parts
from mtjax.sharding.zero import ParameterLayout
from mtjax.theory.rules import DATA, MODEL

Tree = Any
LossSum = Callable[[Tree, Tree], tuple[jax.Array, Tree]]
"""(parameters, microbatch) -> the weighted sum of its losses, and a tree of scalars to report beside it."""


def data_parallel_gradients(
    loss_sum: LossSum, parameters: Tree, batch: Tree, placed: ParameterLayout, num_microbatches: int
) -> tuple[jax.Array, Tree, Tree]:
    """Loss and gradients of a global batch.

    Args:
      loss_sum: differentiated; its weights already divide by the global number of tokens, so sums are means.
      parameters: placed as `placed.stored`.
      batch: arrays [global_batch_size, ...], split over `data` along their first dimension.
      placed: where parameters and gradients live.
      num_microbatches: pieces that each data rank works through one after the other.

    Returns:
      The loss, a float32 scalar; what is reported beside it, summed; and float32 gradients placed as `placed.reduced`.
    """

    def local(parameters: Tree, batch: Tree) -> tuple[jax.Array, Tree, Tree]:
        wrapped = placed.wrap(_by_rank(parameters, batch), num_microbatches)
        parts = differentiable(wrapped)
        microbatches = jax.tree.map(lambda a: a.reshape(num_microbatches, -1, *a.shape[1:]), batch)

        def loss_by_parts(parts: Tree, sums: Tree, microbatch: Tree) -> tuple[jax.Array, Tree]:
            parameters = placed.accumulating(with_parts(wrapped, parts), sums, num_microbatches)
            return loss_sum(placed.whole_but_layers(parameters), microbatch)

        def accumulate(total: tuple[jax.Array, Tree], microbatch: Tree) -> tuple[tuple[jax.Array, Tree], Tree]:
            (loss, report), gradients = jax.value_and_grad(loss_by_parts, has_aux=True)(parts, total[1], microbatch)
            return (total[0] + loss, placed.accumulated(total[1], gradients, num_microbatches)), report

        start = (_by_rank(jnp.zeros(()), batch), zeros_like_parts(parts))
        (loss, gradients), reports = lax.scan(accumulate, start, microbatches)
        with jax.named_scope("gradients"):
            report = jax.tree.map(lambda scalars: sum_ranks(scalars.sum(0)), reports)
            return sum_ranks(loss), report, placed.summed(gradients, wrapped)

    everywhere = PartitionSpec()
    return _map_over_data(local, parameters, batch, placed, (everywhere, everywhere, placed.reduced))


def data_parallel_sum(
    function: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, placed: ParameterLayout
) -> Tree:
    """The scalars that `function` returns, summed over the data ranks' shares of `batch`; nothing is differentiated."""

    def local(parameters: Tree, batch: Tree) -> Tree:
        wrapped = placed.wrap(_by_rank(parameters, batch), None)
        return jax.tree.map(sum_ranks, function(placed.whole_but_layers(wrapped), batch))

    return _map_over_data(local, parameters, batch, placed, PartitionSpec())


def _map_over_data(
    local: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, placed: ParameterLayout, result_specs: Tree
) -> Tree:
    """Runs `local` on every data rank: its parameters, its own part of the batch, `model` explicit inside.

    At the border of the map `model` is automatic: were it explicit there, jax would take each parameter for whole on
    every model rank and gather it on the way in, and its gradient on the way out - with the right numbers.
    """
    # Nothing varies over a single rank: XLA would copy every gradient to sum it over one.
    split = PartitionSpec(DATA) if placed.mesh.data > 1 else PartitionSpec()
    batch = jax.tree.map(lambda a: reshard(a, split), batch)
    batch_specs = jax.tree.map(lambda a: PartitionSpec(*(None for _ in a.shape)), batch)
    inside = explicit_axes(local, axes=(MODEL,), in_sharding=(placed.whole, batch_specs))
    mapped = jax.shard_map(
        inside,
        axis_names={DATA},
        in_specs=(placed.manual(placed.stored), split),
        out_specs=placed.manual(result_specs),
    )
    return auto_axes(axes=(MODEL,), out_sharding=result_specs)(mapped)(parameters, batch)


def _by_rank(values: Tree, batch: Tree) -> Tree:
    """`values` as varying as the batch: autodiff would sum each cotangent of what doesn't over `data` on its own."""
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(batch)), values)
