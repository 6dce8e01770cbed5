"""The interface of a schedule, and of a model that it runs: microbatches in some order, on some devices."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from mtjax.sharding.reduction import Reduction

Tree = Any
Sums = dict[str, Array]
"""Weighted sums of losses by name: float32 scalars; and of what is counted beside them, arrays of other shapes."""


def total_loss(sums: Sums) -> Array:
    """What is minimised: the sum of the losses."""
    return sum((value for value in sums.values() if not value.ndim), start=jnp.zeros(()))


class PipelineModel(Protocol):
    """A model as a schedule sees it: whole, or cut into sections of layers between an entrance and an exit.

    What passes between the cuts is a tree of arrays, the same for every cut: the wire.
    """

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """The losses of the whole model."""
        ...

    def final_boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """The wire behind the last section of the whole model."""
        ...

    @property
    def sections(self) -> Sequence[tuple[str, ...]]:
        """Of each section of layers, which run one after the other, the names of its stacks' parameters."""
        ...

    def boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Arrays like those that pass between the cuts."""
        ...

    def embed(self, section: int, parameters: Tree, wire: Tree, microbatch: Tree) -> Tree:
        """What the first layer of a section reads, from the wire behind the section before."""
        ...

    def forward_layers(
        self, section: int, parameters: Tree, wire: Tree, microbatch: Tree, stage: Array, chunk: Array
    ) -> tuple[Tree, Sums]:
        """Runs the layers of a chunk of a section that a stage has: the wire behind them, and what they add to the
        losses by themselves."""
        ...

    def head_losses(self, parameters: Tree, wire: Tree, microbatch: Tree) -> Sums:
        """The losses of the head, from the wire behind the last section."""
        ...


class MicrobatchSchedule(Protocol):
    """Runs inside a `Region`."""

    def gradients(self, model: PipelineModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """Losses and gradients of this rank's samples.

        Args:
          model: differentiated.
          parameters: this rank's, varying over the axes over which the batch does.
          batch: arrays [samples, ...], this rank's.
          reduction: which gradients are summed over ranks inside the backward pass; its `finish` does the rest.

        Returns:
          The losses, summed over microbatches; float32 gradients of their sum, summed over them too.
        """
        ...

    def unstack_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """Parameters as layers take them; those of layers without a loop layer by layer, in arrays of their own."""
        ...

    def losses(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """The losses alone; parameters are this rank's, placed as `stored`."""
        ...

    def final_boundary(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """The wire behind the last section, on every stage."""
        ...
