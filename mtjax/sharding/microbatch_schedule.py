"""The interfaces of a microbatch schedule and of a model that it runs."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from mtjax.sharding.reduction import Reduction

Tree = Any
Sums = dict[str, Array]
"""By name: weighted sums of losses, float32 scalars; and counters such as the tokens of each expert, float32 arrays."""


def total_loss(sums: Sums) -> Array:
    """Adds up the losses, without the counters: the value that is minimised."""
    return sum((value for value in sums.values() if not value.ndim), start=jnp.zeros(()))


class PipelineModel(Protocol):
    """A model that pipeline stages can share: embedding, sections of layers, and head.

    Sections run one after the other, T5's encoder before its decoder. A *boundary* is what one stage sends to the next
    between two layers: a tree of activations [batch, seq, embed], of the same types behind every layer.
    """

    def with_frozen(self, frozen: Tree) -> "PipelineModel":
        """Returns the model as a function of its other parameters; `frozen` has a part of their tree."""
        ...

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """Computes the losses of the entire model, on ranks that have all layers."""
        ...

    def final_boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Computes the boundary behind the last section, on ranks that have all layers."""
        ...

    @property
    def sections(self) -> Sequence[tuple[str, ...]]:
        """Names of the parameters of each section's stacks, in the order in which sections run."""
        ...

    def boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Returns arrays with the types of a boundary; their values don't matter."""
        ...

    def embed(self, section: int, parameters: Tree, boundary: Tree, microbatch: Tree) -> Tree:
        """Computes the input of a section's first layer, from the boundary behind the section before."""
        ...

    def forward_layers(
        self, section: int, parameters: Tree, boundary: Tree, microbatch: Tree, stage: Array, chunk: Array
    ) -> tuple[Tree, Sums]:
        """Runs the layers of one chunk.

        Args:
          section: of the chunk.
          parameters: this stage's.
          boundary: before the chunk.
          microbatch: its arrays, [batch, ...].
          stage: index of this stage.
          chunk: index among the stage's chunks of the section.

        Returns:
          The boundary behind the chunk, and the losses and counters of its layers (routers have some).
        """
        ...

    def head_losses(self, parameters: Tree, boundary: Tree, microbatch: Tree) -> Sums:
        """Computes the losses of the head, from the boundary behind the last section."""
        ...


class MicrobatchSchedule(Protocol):
    """The order in which a rank works through microbatches and chunks of layers; runs inside a `ManualRegion`."""

    def gradients(self, model: PipelineModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
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

    def losses(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """Computes the losses alone, from this rank's parameters, sharded as `storage_spec`."""
        ...

    def final_boundary(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """Computes the boundary behind the last section, on every stage."""
        ...
