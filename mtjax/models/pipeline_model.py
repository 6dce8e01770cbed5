"""Adapts a model to `PipelineModel`: the interface through which schedules and pipeline stages run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
from jax import Array

from mtjax.models.routers import COUNTS, REPORTED, router_reports
from mtjax.models.stack import Chunk
from mtjax.models.trunk import (
    LOSS_WEIGHTS,
    Batch,
    HiddenStates,
    Keys,
    Section,
    Trunk,
    batch_losses,
    run_sections,
)
from mtjax.sharding.trainable import merge_trees
from mtjax.sharding.vocab import LossOptions

Tree = Any
Microbatch = tuple[Batch, Batch, Keys]
"""A (micro)batch, the weights of its losses by name, and each sample's dropout key; None turns dropout off."""


@dataclass(frozen=True)
class TrunkPipeline:
    """A `PipelineModel` of a trunk with one section, or two (an encoder and a decoder).

    A boundary is the `HiddenStates` of the last section. While the first of two sections runs, its hidden states are in
    the boundary's `encoded`, where the second section reads them.
    """

    model: Callable[[Tree], Trunk]
    """Builds the model from its parameters."""
    options: LossOptions
    sections: Sequence[tuple[str, ...]]
    """See `PipelineModel.sections`."""

    def with_frozen(self, frozen: Tree) -> Self:
        """See `PipelineModel.with_frozen`."""
        return replace(self, model=lambda parameters: self.model(merge_trees(parameters, frozen)))

    def loss_sums(self, parameters: Tree, microbatch: Microbatch) -> dict[str, Array]:
        """See `PipelineModel.loss_sums`."""
        batch, weights, keys = microbatch
        if self.options.at_once and "loss" in weights:
            batch = {**batch, LOSS_WEIGHTS: weights["loss"]}
        return _weighted(batch_losses(self.model(parameters), batch, keys, self.options), weights)

    def final_boundary(self, parameters: Tree, microbatch: Microbatch) -> HiddenStates:
        """See `PipelineModel.final_boundary`."""
        batch, _, keys = microbatch
        return run_sections(self.model(parameters), batch, keys)[0]

    def boundary(self, parameters: Tree, microbatch: Microbatch) -> HiddenStates:
        """See `PipelineModel.boundary`: embeds the input of the last section, without running any layers."""
        batch, _, keys = microbatch
        hidden = None
        for section in self.model(parameters).sections.values():
            hidden = section.embed(batch, keys, hidden)
        assert hidden is not None, "a model has a section"
        return hidden

    def embed(self, section: int, parameters: Tree, boundary: HiddenStates, microbatch: Microbatch) -> HiddenStates:
        """See `PipelineModel.embed`."""
        batch, _, keys = microbatch
        before = self._hidden_states(section - 1, boundary) if section else None
        return self._boundary(section, self._section(parameters, section).embed(batch, keys, before), boundary)

    def forward_layers(
        self, section: int, parameters: Tree, boundary: HiddenStates, microbatch: Microbatch, stage: Array, chunk: Array
    ) -> tuple[HiddenStates, dict[str, Array]]:
        """Runs the layers of a chunk: `PipelineModel.forward_layers`.

        Args:
          section: of the chunk.
          parameters: this stage's.
          boundary: before the chunk, with hidden states [batch, act_seq, embed].
          microbatch: with arrays [batch, ...].
          stage: int32 [].
          chunk: int32 [], among the stage's chunks of the section.

        Returns:
          The boundary behind the chunk; and the weighted sums of its routers' losses, [], and counters, [layers, ...]
          with zeros for layers outside the chunk. These are not sent to the next stage: each stage accumulates those of
          its layers, and they are all-reduced over stages once per step.
        """
        batch, weights, keys = microbatch
        module, hidden = self._section(parameters, section), self._hidden_states(section, boundary)
        # The context is recomputed on each stage from the batch, which all stages have, and not sent.
        layers = Chunk(stage, chunk)
        x, states = module.stack(hidden.x, module.context(batch, keys, hidden), chunk=layers)
        # Routers' losses belong to the layers, so to this stage; all other losses belong to the head.
        router_weights = {name: weight for name, weight in weights.items() if name in REPORTED}
        sums = _weighted(router_reports([states]), router_weights)
        sums = {name: module.stack.scatter_counts(a, layers) if name in COUNTS else a for name, a in sums.items()}
        return self._boundary(section, hidden._replace(x=x), boundary), sums

    def head_losses(self, parameters: Tree, boundary: HiddenStates, microbatch: Microbatch) -> dict[str, Array]:
        """See `PipelineModel.head_losses`."""
        batch, weights, keys = microbatch
        head_weights = {name: weight for name, weight in weights.items() if name not in REPORTED}
        return _weighted(self.model(parameters).losses(boundary, batch, keys, self.options), head_weights)

    def _section(self, parameters: Tree, index: int) -> Section:
        return self.model(parameters).sections[self.sections[index][0]]

    def _hidden_states(self, section: int, boundary: HiddenStates) -> HiddenStates:
        """Takes a section's hidden states out of a boundary."""
        if section == len(self.sections) - 1:
            return boundary
        assert boundary.encoded is not None
        return HiddenStates(boundary.encoded)

    def _boundary(self, section: int, hidden: HiddenStates, before: HiddenStates) -> HiddenStates:
        """Puts a section's hidden states into a boundary."""
        return hidden if section == len(self.sections) - 1 else before._replace(encoded=hidden.x)


def _weighted(values: dict[str, Array], weights: Batch) -> dict[str, Array]:
    """Sums values over samples and tokens, weighted.

    Args:
      values: by name, [batch, ...] or [batch, seq, ...]; or [] if they are a weighted sum already.
      weights: by name, [batch] or [batch, seq]; values without a weight are left out.

    Returns:
      [...] by name: scalars for losses.
    """

    def one(values: Array, weights: Array) -> Array:
        if not values.ndim:
            return values
        each = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
        return (values * each).sum(range(weights.ndim))

    with jax.named_scope("loss"):
        return {name: one(values[name], weight) for name, weight in weights.items()}
