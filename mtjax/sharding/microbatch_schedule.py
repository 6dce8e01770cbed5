"""The interfaces of a microbatch schedule and of a model that it runs."""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from mtjax.sharding.reduction import Reduction

Tree = Any
Sums = dict[str, Array]
"""By name: weighted sums of losses, float32 scalars; and counters such as the tokens of each expert, float32 arrays."""


def total_loss(sums: Sums) -> Array:
    """Adds up the losses, without the counters: the value that is minimised."""
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

    def final_boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Computes the hidden states behind the last layer."""
        ...


class MicrobatchSchedule(Protocol):
    """The order in which a rank works through microbatches and chunks of layers; runs inside a `ManualRegion`."""

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
        ...

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """Prepares parameters for layers, once per step: gathers those of ZeRO-1 and 2, unstacks those of unrolled
        layers."""
        ...

    def losses(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """Computes the losses alone, from this rank's parameters, sharded as `storage_spec`."""
        ...

    def final_boundary(self, model: LossModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """Computes the hidden states behind the last layer, on every stage."""
        ...
