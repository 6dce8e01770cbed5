"""Hybrid models: a decoder whose layers are of several kinds, by a pattern (`mtjax.config.layer_pattern`)."""

import dataclasses
from collections.abc import Callable

from jax import Array

from mtjax.config import Model
from mtjax.config.layer_pattern import SHARED
from mtjax.config.shared_blocks import num_blocks
from mtjax.families.gpt.model import GPT
from mtjax.models.language_model import Batch, HiddenStates, Keys
from mtjax.models.layer import Layer, Stack
from mtjax.models.layer_context import LayerContext
from mtjax.models.shared_block import SharedLayer, draw_blocks
from mtjax.models.shared_inputs import SharedInputs


class Hybrid(GPT):
    """GPT's embedding and head, and a stack of layers for each letter of the pattern."""

    def _draw_stacks(self, model: Model, make_stack: Callable[..., Stack], key: Array) -> None:
        """Draws the layers, and the shared blocks."""
        super()._draw_stacks(model, make_stack, key)
        blocks = draw_blocks(model, num_blocks(model), self.dtype, key)
        self.blocks = tuple(blocks)
        for name, block in blocks.items():
            setattr(self, name, block)

    @staticmethod
    def layer_type(kind: str) -> type[Layer]:
        """Returns the class of the layers of a kind."""
        return SharedLayer if kind in SHARED.values() else Layer

    def _embed(
        self, batch: Batch, keys: Keys, before: HiddenStates | None, positions: Array | None = None
    ) -> HiddenStates:
        """Embeds tokens; where layers of any stage read shared blocks, the embeddings go with the hidden states."""
        hidden = super()._embed(batch, keys, before, positions)
        # With pipelines they cross every stage's boundary, as the encoder's output of a T5 does.
        return hidden._replace(encoded=hidden.x) if self.blocks else hidden

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Adds the shared blocks, and the embeddings that they read."""
        context = super()._context(batch, keys, hidden)
        if not self.blocks:
            return context
        blocks = tuple(getattr(self, name) for name in self.blocks)
        assert hidden.encoded is not None
        return dataclasses.replace(context, shared=SharedInputs(blocks, hidden.encoded))
