"""Retro (arXiv 2112.04426): a GPT some of whose layers also read neighbours, texts like the chunk before.

Neighbours of a chunk are the same number of tokens for every chunk, so that all of a batch are one array. A batch
without them is read as by a GPT: chunked cross-attention and the encoder are left out.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.config import Config, Model
from mtjax.families.gpt.model import GPT
from mtjax.families.retro.config import letters_of_retro, neighbour_length, num_chunks
from mtjax.families.retro.layout import FIRST_REST
from mtjax.families.retro.stacks import LETTERS, RetroLayer, RetroStacks, neighbour_keys
from mtjax.layout.stacks import ENCODER, stacks_of
from mtjax.models.language_model import EMBEDDING_SITE, Batch, HiddenStates, Keys, Section, embed_tokens
from mtjax.models.layer import Stack
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.ops import dropout, make_norm
from mtjax.sharding.axes import spec

NEIGHBOURS = "neighbours"
"""Array of a batch: tokens of neighbours, [batch, chunks, neighbours, tokens]."""
READS = "reads_neighbours"
"""Array of a batch of packed rows: 1 on tokens that read neighbours, [batch, seq]."""


class Retro(GPT):
    """GPT's embedding and head, and layers that read neighbours."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        self.first_norm = make_norm(config.model, self.dtype)
        if not config.model.retro_final_norm:
            self.final_norm = None

    def _draw_stacks(self, model: Model, stack: Callable[..., Stack], key: Array) -> None:
        """Draws the layers of each stack, whose attribute has the name of its parameters."""
        rate = model.retro_encoder_dropout
        encoder = dataclasses.replace(
            model, num_layers=model.retro_encoder_layers, hidden_dropout=rate, attention_dropout=rate
        )
        encoder_key, self.paths = (
            jax.random.fold_in(key, 1),
            tuple(layer_stack.path for layer_stack in stacks_of(model)),
        )
        for layer_stack in stacks_of(model):
            of, drawn_from = (encoder, encoder_key) if layer_stack.path.startswith(ENCODER) else (model, key)
            setattr(self, layer_stack.path, stack(of, layer_stack=layer_stack, key=drawn_from, layer_type=RetroLayer))
        self.letters = letters_of_retro(model)

    @property
    def sections(self) -> dict[str, Section]:
        """One section of all stacks."""
        stacks = {LETTERS[path]: getattr(self, path) for path in self.paths}
        others = tuple(path for path in self.paths if path != FIRST_REST)
        section = RetroStacks(stacks, self.first_norm, self.letters)
        return {FIRST_REST: Section(section, self._embed, self._context, others)}

    def _embed(
        self, batch: Batch, keys: Keys, before: HiddenStates | None, positions: Array | None = None
    ) -> HiddenStates:
        """Embeds tokens, and the neighbours' with the same tables."""
        hidden = super()._embed(batch, keys, before, positions)
        # Evaluation without neighbours, and generation of prompts that have none.
        if NEIGHBOURS not in batch:
            return hidden
        with jax.named_scope("embedding"):
            tokens = batch[NEIGHBOURS]
            # A neighbour is a row of its own: positions begin at 0, and attention stays within it.
            rows = tokens.reshape(-1, tokens.shape[-1], out_sharding=spec("batch", None))
            read = embed_tokens(self.embedding, self.positions, rows, self.dtype)
            read = dropout(read, self.rate, neighbour_keys(keys, len(rows)), EMBEDDING_SITE, RESIDUAL)
            # XLA: with the barrier, all rows are sent before the first layer's; otherwise it may join these with the
            # neighbours', which are read later.
            x, read = jax.lax.optimization_barrier((hidden.x, read))
            return HiddenStates(x, read)

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Adds the embedded neighbours, and which tokens read them."""
        context = super()._context(batch, keys, hidden)
        return dataclasses.replace(context, encoded=hidden.encoded, reads=batch.get(READS))

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of next-token prediction, and the neighbours; of conversations also who reads them."""
        model, arrays, is_chat = config.model, GPT.batch_arrays(config), config.finetuning.task == "chat"
        if not model.retro_reads:
            return arrays
        shape = (num_chunks(model), model.retro_num_neighbours, neighbour_length(model))
        arrays[NEIGHBOURS] = jax.ShapeDtypeStruct(shape, jnp.int32)
        reads = {READS: jax.ShapeDtypeStruct((model.sequence_length,), jnp.int32)} if is_chat else {}
        return arrays | reads
