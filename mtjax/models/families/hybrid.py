"""Hybrid models: a decoder whose layers are of several kinds, by a pattern (`mtjax.config.layer_pattern`)."""

import dataclasses
from collections.abc import Callable

from jax import Array

from mtjax.config import Model
from mtjax.config.layer_pattern import KIND_OF, SHARED
from mtjax.config.shared_blocks import num_blocks
from mtjax.config.ssm import letters_of, numbers_of
from mtjax.models.families.gpt import GPT
from mtjax.models.layer_context import LayerContext
from mtjax.models.pattern_stacks import PatternStacks
from mtjax.models.shared_block import SharedLayer, draw_blocks
from mtjax.models.shared_inputs import SharedInputs
from mtjax.models.stack import Stack
from mtjax.models.trunk import Batch, HiddenStates, Keys, Section


class Hybrid(GPT):
    """GPT's embedding and head, and a stack of layers for each letter of the pattern."""

    def _draw_stacks(self, model: Model, stack: Callable[..., Stack], key: Array) -> None:
        """Draws the layers: a stack of each kind, whose attribute has the name of the kind."""
        self.letters = letters_of(model)
        for letter, kind in self._kinds.items():
            own = {"layer_type": SharedLayer} if letter in SHARED else {}
            setattr(self, kind, stack(model, kind=kind, layers=numbers_of(model, letter), key=key, **own))
        blocks = draw_blocks(model, num_blocks(model), self.dtype, key)
        self.blocks = tuple(blocks)
        for name, block in blocks.items():
            setattr(self, name, block)

    @property
    def _kinds(self) -> dict[str, str]:
        return {letter: kind for letter, kind in KIND_OF.items() if letter in self.letters}

    @property
    def sections(self) -> dict[str, Section]:
        """One section of all stacks."""
        stacks = {letter: getattr(self, kind) for letter, kind in self._kinds.items()}
        first, *others = self._kinds.values()
        return {first: Section(PatternStacks(stacks, self.letters), self._embed, self._context, tuple(others))}

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Adds the shared blocks, and the embeddings that they read."""
        context = super()._context(batch, keys, hidden)
        if not self.blocks:
            return context
        blocks = tuple(getattr(self, name) for name in self.blocks)
        return dataclasses.replace(context, shared=SharedInputs(blocks, hidden.x))

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The stacks whose layers generate text."""
        return tuple(getattr(self, kind) for kind in self._kinds.values())
