"""Computes gradients of a global batch: a schedule inside the manual region, then a reduction over ranks.

In the manual region every mesh axis except `model` is manual. XLA: with explicit axes, the partitioner would reduce
each layer's gradients in the compute type once per microbatch, inside the backward loop. With manual axes, all values
are local to a rank and its samples, and the program itself decides when and in which type gradients are reduced.

Without pipeline stages the schedule is gradient accumulation: one microbatch after the other, each through the entire
model. The backward pass accumulates layer by layer: a loop over layers carries the stack of parameters unchanged; the
cotangent of that carry is the accumulator, to which each iteration of the backward loop adds the gradients of its layer
in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, auto_axes, explicit_axes, reshard

from mtjax.layout.mesh import MeshShape
from mtjax.layout.rules import MANUAL, STAGE, Axes, Rules
from mtjax.sharding.axes import only_axes, psum_varying, varying_like, with_axes
from mtjax.sharding.param_comm import differentiable_shards, with_shards
from mtjax.sharding.param_specs import ParamSpec, partition_specs, trained
from mtjax.sharding.zero import Reduction, gather_for_inference, gather_for_step, materialize_outside_stacks

if TYPE_CHECKING:
    from mtjax.sharding.pipeline.executor import PipelineSchedule


Tree = Any
T = TypeVar("T")


@dataclass(frozen=True)
class ManualRegion:
    """The manual region of a model on a mesh."""

    mesh: MeshShape
    rules: Rules
    records: Tree
    """The `ParamSpec` of each parameter."""

    @property
    def manual(self) -> Axes:
        """Axes that are manual inside."""
        return tuple(axis for axis in self.mesh.axes if axis in MANUAL)

    @property
    def explicit(self) -> Axes:
        """Axes that are explicit inside: XLA's partitioner inserts the collectives over these."""
        return tuple(axis for axis in self.mesh.axes if axis not in MANUAL)

    def batch_spec(self, dimensions: int) -> PartitionSpec:
        """Returns the sharding of an array of a batch, [batch] or [batch, seq]."""
        spec = PartitionSpec()
        for dim, axes in enumerate((self.rules.batch, self.rules.seq)[:dimensions]):
            # XLA: values that vary over an axis of degree 1 would be copied for a reduction over one rank.
            if sharded := tuple(axis for axis in axes if self.mesh.degree((axis,)) > 1):
                spec = with_axes(PartitionSpec(*spec, *(None,) * (dim + 1 - len(spec))), dim, sharded)
        return spec

    def mark_varying(self, parameters: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Marks a rank's parameters and samples as varying over the axes over which its work differs from others'."""
        if STAGE in self.manual:
            # Pipeline stages do different work on the same samples.
            batch = jax.tree.map(lambda a: lax.pcast(a, (STAGE,), to="varying"), batch)
        # The transpose of a cast to varying is an all-reduce. Done here, outside the differentiated function, it is
        # never transposed. Without it, jax would insert the cast, and autodiff the all-reduce, at each use of a value.
        return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(batch)), parameters), batch

    def shard_batch(self, batch: Tree) -> Tree:
        """Shards a batch, arrays [batch] or [batch, seq], over ranks."""
        return jax.tree.map(lambda a: reshard(a, self.batch_spec(a.ndim)), batch)

    def map(self, local: Callable[[Tree, Tree], Tree], batch: Tree, results: Tree) -> Callable[[Tree, Tree], Tree]:
        """Returns a function that runs `local` on every rank, with `model` explicit inside.

        Args:
          local: (this rank's shards of the parameters, its shard of the batch) -> results.
          batch: arrays like those of the batch, [batch] or [batch, seq].
          results: specs of what `local` returns; its values may vary only over the manual axes that these name.

        Returns:
          (parameters sharded as `storage_spec`, the result of `shard_batch`) -> results.
        """
        batch_specs = jax.tree.map(lambda a: PartitionSpec(*(None for _ in a.shape)), batch)
        compute_specs = self._only(partition_specs(self.records, "compute_spec"), self.explicit)
        # `model` is explicit inside, but automatic at the border (`auto_axes` around `shard_map` around
        # `explicit_axes`): were it explicit there, jax would treat each parameter as replicated over `model`, and
        # gather it on entry and its gradient on exit. The results would be right, but slow.
        mapped = jax.shard_map(
            explicit_axes(local, axes=self.explicit, in_sharding=(compute_specs, batch_specs)),
            axis_names=set(self.manual),
            in_specs=(
                self._only(partition_specs(self.records, "storage_spec"), self.manual),
                jax.tree.map(lambda a: self.batch_spec(a.ndim), batch),
            ),
            out_specs=self._only(results, self.manual),
        )
        return auto_axes(axes=self.explicit, out_sharding=results)(mapped)

    @staticmethod
    def _only(specs: Tree, axes: Axes) -> Tree:
        return jax.tree.map(lambda spec: only_axes(spec, axes), specs)


AddsUp = Callable[[ParamSpec], bool]
"""Whether the backward pass adds a gradient to its accumulator layer by layer, so that no full copy of it exists."""


@partial(jax.tree_util.register_dataclass, data_fields=["parameter", "accumulator"], meta_fields=[])
@dataclass(frozen=True)
class AccumulateInto:
    """A stack's parameter whose gradient is `accumulator` plus this microbatch's gradient."""

    parameter: Any
    accumulator: Any
    """The sum of earlier microbatches' gradients, float32."""


def zeros_like_shards(shards: Tree) -> Tree:
    """Builds float32 accumulators in the shapes of `shards`."""
    # They are a loop's carry, whose type says over which axes it varies: those of the gradients that are added.
    return jax.tree.map(lambda p: varying_like(jnp.zeros_like(p, jnp.float32), p), shards)


def with_accumulators(records: Tree, wrapped: Tree, sums: Tree, adds_up: AddsUp) -> Tree:
    """Wraps parameters in `AccumulateInto` where `adds_up`: their gradients come out added to `sums`."""

    def one(record: ParamSpec, leaf: Any, accumulator: Array) -> Any:
        if not adds_up(record):
            return leaf
        return AccumulateInto(leaf, jnp.zeros_like(accumulator) if record.grad_reduction.is_maximum else accumulator)

    return jax.tree.map(one, records, wrapped, sums)


def add_gradients(records: Tree, sums: Tree, gradients: Tree, adds_up: AddsUp) -> Tree:
    """Adds a microbatch's gradients to the accumulators.

    Args:
      records: of each parameter.
      sums: accumulators, float32.
      gradients: with respect to parameters of `with_accumulators`, with the same `sums`.
      adds_up: the same predicate; these gradients contain the sum already.
    """

    def one(record: ParamSpec, accumulator: Any, gradient: Any) -> Any:
        """Adds a parameter's gradient to its sum, unless the backward pass has added it."""
        if adds_up(record) and not record.grad_reduction.is_maximum:
            return gradient
        # In float32: sums of many microbatches in bfloat16 would lose the small ones.
        add = jnp.maximum if record.grad_reduction.is_maximum else jnp.add
        return jax.tree.map(lambda a, g: add(a, g.astype(jnp.float32)), accumulator, gradient)

    return jax.tree.map(one, records, sums, gradients)


# --- in loops over layers


def split_accumulators(layers: T) -> tuple[T, list[Array] | None]:
    """Separates a stack's parameters, of which some are `AccumulateInto`, from their accumulators, in their order; None
    where there are none."""
    # `AccumulateInto` reaches the model as a parameter, and is unwrapped here, before the loop over layers.
    is_leaf = lambda x: isinstance(x, AccumulateInto)  # noqa: E731
    sums = [leaf.accumulator for leaf in jax.tree.leaves(layers, is_leaf=is_leaf) if is_leaf(leaf)]
    plain = jax.tree.map(lambda leaf: leaf.parameter if is_leaf(leaf) else leaf, layers, is_leaf=is_leaf)
    return plain, sums or None


def accumulate_grads_into(layer: T, stack: list[Array], index: Array) -> tuple[T, list[Array]]:
    """Returns both unchanged; in the backward pass, adds the layer's gradients to the cotangents of `stack`.

    Args:
      layer: parameters of one layer.
      stack: the `differentiable_shards` of all layers, each [layers, ...], in the same order.
      index: the layer's position in the stack.
    """
    # The layer itself was indexed from a copy without gradient, so its gradient goes nowhere else.
    shards, tree = jax.tree.flatten(differentiable_shards(layer))
    shards, stack = _tie(shards, stack, index)
    return with_shards(layer, jax.tree.unflatten(tree, shards)), stack


@jax.custom_vjp
def _tie(shards: list[Array], stack: list[Array], index: Array) -> tuple[list[Array], list[Array]]:
    return shards, stack


def _tie_forward(shards: list[Array], stack: list[Array], index: Array) -> tuple[Any, Array]:
    return (shards, stack), index


def _tie_backward(index: Array, gradients: tuple[list[Array], list[Array]]) -> tuple[None, list[Array], None]:
    """Adds the layer's gradients [...] to the accumulators [layers, ...] at `index`."""
    of_layer, sums = gradients
    return None, [add_to_layer(total, grad, index) for total, grad in zip(sums, of_layer, strict=True)], None


_tie.defvjp(_tie_forward, _tie_backward)


def add_to_layer(stack: Array, value: Array, index: Any) -> Array:
    """Adds `value` [...] to one layer of a stack [layers, ...]; `index` is from 0."""
    # XLA: one kernel reads and writes the layer only if both have the same index, without arithmetic for indices below
    # 0, and if the layer is not reshaped between; else the layer is copied before.
    before = lax.dynamic_slice_in_dim(stack, index, 1, allow_negative_indices=False)
    return lax.dynamic_update_slice_in_dim(stack, before + value[None], index, 0, allow_negative_indices=False)


@jax.custom_vjp
def seed_cotangents(sums: Tree, x: Array, stack: Tree) -> Array:
    """Returns `x`; in the backward pass, the cotangents of `stack` begin as `sums` instead of zeros.

    Args:
      sums: gradient accumulators, float32, in the shapes of `stack`.
      x: hidden states after the last layer.
      stack: what the loop over layers carried unchanged; nothing else may read it.
    """
    return x


def _seed_forward(sums: Tree, x: Array, stack: Tree) -> tuple[Array, Tree]:
    return x, sums


def _seed_backward(sums: Tree, gradient: Array) -> tuple[None, Array, Tree]:
    return None, gradient, sums


seed_cotangents.defvjp(_seed_forward, _seed_backward)


Sums = dict[str, Array]
"""By name: weighted sums of losses, float32 scalars; and counters such as the tokens of each expert, float32 arrays."""


def total_loss(sums: Sums) -> Array:
    """Adds up the losses, without the counters: the value that is minimized."""
    # Losses are scalars; counters, such as the tokens of each expert, are arrays.
    return sum((value for value in sums.values() if not value.ndim), start=jnp.zeros(()))


class LossModel(Protocol):
    """A model as a function of its parameters, on ranks that have all layers."""

    def with_frozen(self, frozen: Tree) -> "LossModel":
        """Returns the model as a function of its other parameters; `frozen` has a part of their tree."""
        ...

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """Computes the losses of a microbatch."""
        ...


MicrobatchSchedule: TypeAlias = "Accumulate | PipelineSchedule"
"""The order in which a rank works through microbatches and chunks of layers; runs inside a `ManualRegion`."""


def in_microbatches(batch: Tree, count: int) -> Tree:
    """Reshapes arrays [samples, ...] to [microbatches, samples of a microbatch, ...]."""
    return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)


@dataclass(frozen=True)
class Accumulate:
    """Accumulates gradients over microbatches, on ranks that have all layers."""

    num_microbatches: int

    def gradients(self, model: LossModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """Computes losses and gradients of this rank's samples.

        Args:
          model: differentiated.
          parameters: this rank's shards, varying over the axes over which the batch does.
          batch: arrays [samples, ...], this rank's.
          reduction: which gradients are reduced inside the backward pass; the caller reduces the others.

        Returns:
          The losses, and the float32 gradients of their sum, both summed over microbatches.
        """
        records, wrapped = reduction.records, reduction.wrap(parameters)
        prepared = self.prepare_parameters(records, wrapped)
        # Differentiated by shards, not by parameters: a gradient has its primal's shape, and that of a reduced one is a
        # shard's.
        shards = differentiable_shards(prepared)
        sums = self.zeros(records, wrapped, shards)

        def loss(shards: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            """Computes the total loss of a microbatch by the differentiable shards."""
            parameters = with_accumulators(records, with_shards(prepared, shards), sums, self.adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return total_loss(losses), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            """Adds a microbatch's gradients to the accumulators; one iteration of the loop over microbatches."""
            gradients, losses = jax.grad(loss, has_aux=True)(shards, sums, microbatch)
            return self.add(records, sums, gradients), losses

        # One trace for all microbatches; the carry is updated in place.
        gradients, losses = lax.scan(accumulate, sums, in_microbatches(batch, self.num_microbatches))
        # Weights divide by the counts of the global batch, so that sums over microbatches are means.
        return jax.tree.map(lambda scalars: scalars.sum(0), losses), gradients

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """Prepares parameters for layers, once per step: gathers those of ZeRO-1 and 2."""
        return gather_for_step(records, wrapped)

    def losses(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """Computes the losses alone, from this rank's parameters, sharded as `storage_spec`; one microbatch."""
        return model.loss_sums(gather_for_inference(records, parameters), batch)

    def zeros(self, records: Tree, wrapped: Tree, shards: Tree) -> Tree:
        """Builds the gradient accumulators of parameters as `Reduction.wrap` returns them, and as layers use them."""
        return zeros_like_shards(shards)

    def add(self, records: Tree, sums: Tree, gradients: Tree) -> Tree:
        """Adds a microbatch's gradients to the accumulators."""
        return add_gradients(records, sums, gradients, self.adds_up)

    def adds_up(self, record: ParamSpec) -> bool:
        """Returns whether the backward pass adds a gradient to its accumulator layer by layer (`AccumulateInto`)."""
        return record.is_stacked and self.num_microbatches > 1


def distributed_gradients(
    model: LossModel, batch: Tree, region: ManualRegion, schedule: MicrobatchSchedule, reduction: Reduction
) -> Callable[[Tree, Tree], tuple[Sums, Tree]]:
    """Returns the function that computes losses and gradients of a global batch.

    Args:
      model: differentiated; the weights of its losses already divide by global counts, so sums are means.
      batch: a sharded batch, or arrays like it; only shapes are read.
      region: in which it runs.
      schedule: the order of microbatches.
      reduction: how gradients of the trainable parameters are reduced.

    Returns:
      (parameters sharded as `storage_spec`, the result of `region.shard_batch`) -> the losses by name, float32 scalars;
      and float32 gradients of their sum, sharded as `storage_spec`, of the trainable parameters.
    """
    records = region.records

    def local(parameters: Tree, batch: Tree) -> tuple[Sums, Tree]:
        """Runs on each rank: its shards of the parameters and of the batch -> losses and reduced gradients."""
        # What varies over an axis has a gradient that is local to each rank along it.
        parameters, batch = region.mark_varying(parameters, batch)
        of_trained, trained_parameters = model, trained(records, parameters)
        if trained_parameters is not parameters:
            # Frozen parameters are bound to the model, so that what follows sees trained ones alone.
            from mtjax.sharding.trainable import bind_frozen

            of_trained = bind_frozen(model, records, parameters, schedule)
        losses, gradients = schedule.gradients(of_trained, trained_parameters, batch, reduction)
        # Losses are sums with global weights: their all-reduce over all ranks is the global mean.
        with jax.named_scope("gradients"):
            return jax.tree.map(psum_varying, losses), reduction.finish(gradients)

    results = PartitionSpec(), partition_specs(trained(records, records), "storage_spec")
    return region.map(local, batch, results)
