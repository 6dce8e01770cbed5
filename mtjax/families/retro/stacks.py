"""The layers of Retro: a decoder's, and within the first of them that reads neighbours, an encoder's."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array

from mtjax.config import Model
from mtjax.families.retro.layout import ENCODER_FIRST, FIRST_ATTENTION, FIRST_REST, PLAIN, RETRO
from mtjax.layout.stacks import ENCODER
from mtjax.models.layer import Layer, Stack
from mtjax.models.layer_context import LayerContext, MixerState, Residual
from mtjax.models.layer_loop import RunStack
from mtjax.models.mixers.chunked import keys_of_rows
from mtjax.models.ops import Norm
from mtjax.models.pattern_stacks import PatternLoop
from mtjax.sharding.gradients import seed_cotangents

LETTERS: Mapping[str, str] = {
    PLAIN: "P",
    FIRST_ATTENTION: "A",
    ENCODER_FIRST: "F",
    ENCODER: "E",
    FIRST_REST: "R",
    RETRO: "X",
}
"""Stack -> its letter in the pattern of layers."""
ENCODER_SITE = 2**31 - 2
"""Folded into the dropout keys, so that the encoder's differ from the decoder's."""


class RetroLayer(Layer):
    """A layer of a Retro."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, dtype, kind=kind, key=key)
        if self.mixers[0] == "chunked":
            del self.chunked_norm  # outside of the layer: the encoder reads its result, too

    def __call__(
        self, x: Residual, context: LayerContext, states: Mapping[str, MixerState] | None
    ) -> tuple[Residual, dict[str, MixerState] | None]:
        """Runs the mixers. Without neighbours in the context, chunked cross-attention is left out."""
        del states
        for name in self.mixers:
            if name == "chunked" and context.encoded is None:
                continue
            mixer = getattr(self, name)
            with jax.named_scope(mixer.scope):
                is_outside = name == self.mixers[0] == "chunked"
                normed: Any = context.retro_normed if is_outside else self.normalize(f"{name}_norm", x)
                # As in Megatron, what the encoder's cross-attention adds to is its own normalized input.
                x = self.add(normed if name == "cross" else x, mixer(normed, context, None)[0], mixer, context)
        return x, None


@dataclass(frozen=True)
class RetroStacks:
    """The stacks of a Retro, by their letters, which run as one section."""

    stacks: Mapping[str, Stack]
    norm: Norm
    """Of the input of the first chunked cross-attention."""
    letters: str
    """Letter of each layer of the decoder; of the first layer with chunked cross-attention R."""

    def over_layers(self, context: LayerContext, states: MixerState = None) -> RunStack:
        """See `Stack.over_layers`; the context's `encoded` are the embedded neighbours, [samples x chunks x neighbours,
        tokens, embed], or None."""
        # Retro generates without a KV cache.
        assert states is None
        return partial(self._run, context=context)

    def _run(self, x: Residual, context: LayerContext) -> tuple[Residual, MixerState]:
        """Runs all layers."""
        neighbours, below = context.encoded, dataclasses.replace(context, encoded=None)
        used = {letter: stack for letter, stack in self.stacks.items() if neighbours is not None or letter not in "FE"}
        loop, done = PatternLoop.of(used, below, None), dict.fromkeys(used, 0)
        before, _, behind = self.letters.partition("R")
        # The layer R is in two halves: the encoder reads what its attention (A) gives.
        (x, carried), _ = loop.run_all(f"{before}A", done, (x, loop.carried))
        if neighbours is not None:
            normed = self.norm(x)
            keys = neighbour_keys(context.dropout_keys, len(neighbours))
            # Segments and padding are the decoder's: a neighbour is one text, all of which is read.
            alone = {"segment_ids": None, "padding": None, "retro_reads": None}
            inside = dataclasses.replace(below, **alone, retro_normed=normed, is_causal=False, dropout_keys=keys)
            encoder = "F" + "E" * (len(self.stacks["E"].order.flat) if "E" in self.stacks else 0)
            encoding = dataclasses.replace(loop, context=inside)
            (encoded, carried), _ = encoding.run_all(encoder, done, (neighbours, carried))
            loop = dataclasses.replace(loop, context=dataclasses.replace(below, retro_normed=normed, encoded=encoded))
        carry, _ = loop.run_all(f"R{behind}", done, (x, carried))
        return seed_cotangents(loop.accumulators, *carry), None


def neighbour_keys(keys: Array | None, rows: int) -> Array | None:
    """Derives the dropout keys of so many neighbours from those of samples."""
    if keys is None:
        return None
    return keys_of_rows(jax.vmap(lambda key: jax.random.fold_in(key, ENCODER_SITE))(keys), rows)
