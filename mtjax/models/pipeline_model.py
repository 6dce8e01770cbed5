"""Divides a model into what pipeline stages run: the embedding, chunks of layers, and the head."""

from functools import partial
from typing import Any, cast

from jax import Array

from mtjax.models.language_model import HiddenStates, Microbatch, Section, TrunkLossFunction, weighted_sums
from mtjax.models.layer import Stack
from mtjax.models.pattern_stacks import PatternStacks
from mtjax.models.routers import COUNTS, REPORTED, router_reports
from mtjax.models.stack_chunks import Chunk, run_chunk, scatter_counts

Tree = Any


class TrunkPipeline(TrunkLossFunction):
    """A `PipelineModel` of a trunk with one section, or two (an encoder and a decoder).

    A boundary is the `HiddenStates` of the last section. While the first of two sections runs, its hidden states are in
    the boundary's `encoded`, where the second section reads them.
    """

    def boundary(self, parameters: Tree, microbatch: Microbatch) -> HiddenStates:
        """See `PipelineModel.boundary`: embeds the input of the last section, without running any layers."""
        batch, _, keys = microbatch
        hidden = None
        # Each from the embedding of the section before, instead of its output: types are all that is needed.
        for section in self.build(parameters).sections.values():
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
          The boundary after the chunk; and the weighted sums of its routers' losses, [], and counters, [layers, ...]
          with zeros for layers outside the chunk. These are not sent to the next stage: each stage accumulates those of
          its layers, and they are all-reduced over stages once per step.
        """
        batch, weights, keys = microbatch
        module, hidden = self._section(parameters, section), self._hidden_states(section, boundary)
        # The context is recomputed on each stage from the batch, which all stages have, and not sent.
        layers, stack = Chunk(stage, chunk), cast(Stack | PatternStacks, module.stack)  # Retro has no stages
        is_one = isinstance(stack, Stack)
        run, counted = (partial(run_chunk, stack), stack) if is_one else (stack.run_chunk, stack.with_experts)
        x, states = run(hidden.x, module.context(batch, keys, hidden), layers)
        # Routers' losses belong to the layers, so to this stage; all other losses belong to the head.
        router_weights = {name: weight for name, weight in weights.items() if name in REPORTED}
        sums = weighted_sums(router_reports([states]), router_weights)
        sums = {name: scatter_counts(counted, a, layers) if name in COUNTS else a for name, a in sums.items()}
        return self._boundary(section, hidden._replace(x=x), boundary), sums

    def head_losses(self, parameters: Tree, boundary: HiddenStates, microbatch: Microbatch) -> dict[str, Array]:
        """See `PipelineModel.head_losses`."""
        batch, weights, keys = microbatch
        head_weights = {name: weight for name, weight in weights.items() if name not in REPORTED}
        return weighted_sums(self.build(parameters).losses(boundary, batch, keys, self.options), head_weights)

    def _section(self, parameters: Tree, index: int) -> Section:
        return self.build(parameters).sections[self.sections[index][0]]

    def _hidden_states(self, section: int, boundary: HiddenStates) -> HiddenStates:
        """Takes a section's hidden states out of a boundary."""
        if section == len(self.sections) - 1:
            return boundary
        assert boundary.encoded is not None
        return HiddenStates(boundary.encoded)

    def _boundary(self, section: int, hidden: HiddenStates, before: HiddenStates) -> HiddenStates:
        """Puts a section's hidden states into a boundary."""
        return hidden if section == len(self.sections) - 1 else before._replace(encoded=hidden.x)
