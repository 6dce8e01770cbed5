"""The interface of a model that pipeline stages share."""

from collections.abc import Sequence
from typing import Any, Protocol

from jax import Array

from mtjax.sharding.gradients import LossFunction, LossSums

Tree = Any


class PipelineModel(LossFunction, Protocol):
    """A model that pipeline stages can share: embedding, sections of layers, and head.

    Sections run one after the other, T5's encoder before its decoder. A *boundary* is what one stage sends to the next
    between two layers: a tree of activations [batch, seq, embed], of the same types after every layer.
    """

    @property
    def sections(self) -> Sequence[tuple[str, ...]]:
        """Names of the parameters of each section's stacks, in the order in which sections run."""
        ...

    def boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Returns arrays with the types of a boundary; their values don't matter."""
        ...

    def embed(self, section: int, parameters: Tree, boundary: Tree, microbatch: Tree) -> Tree:
        """Computes the input of a section's first layer, from the boundary after the section before."""
        ...

    def forward_layers(
        self, section: int, parameters: Tree, boundary: Tree, microbatch: Tree, stage: Array, chunk: Array
    ) -> tuple[Tree, LossSums]:
        """Runs the layers of one chunk.

        Args:
          section: of the chunk.
          parameters: this stage's.
          boundary: before the chunk.
          microbatch: its arrays, [batch, ...].
          stage: index of this stage.
          chunk: index among the stage's chunks of the section.

        Returns:
          The boundary after the chunk, and the losses and counters of its layers (routers have some).
        """
        ...

    def head_losses(self, parameters: Tree, boundary: Tree, microbatch: Tree) -> LossSums:
        """Computes the losses of the head, from the boundary after the last section."""
        ...
