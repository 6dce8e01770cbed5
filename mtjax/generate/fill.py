"""Mask filling with BERT: the most likely tokens for each mask, from one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.errors import UserError
from mtjax.families.bert.model import BERT
from mtjax.generate.sampling import SampledTokens, score_tokens
from mtjax.generate.shapes import doubled
from mtjax.generate.weights import LoadedModel, special_id
from mtjax.models.language_model import run_sections
from mtjax.sharding.axes import use_rules
from mtjax.sharding.vocab import OutputOptions

MASK = "[MASK]"


@dataclass(frozen=True)
class Filling:
    """A candidate token for a mask."""

    token: int
    text: str
    probability: float
    """The model's probability of this token at the mask, given all other tokens."""


class Filler:
    """A BERT on a mesh. A program is compiled for each padded length (16, 32, ...) and padded number of masks."""

    def __init__(self, model: LoadedModel) -> None:
        """Stores the model.

        Raises:
          UserError: the model is not a BERT, the vocabulary has no mask token, or the mesh has pipeline parallelism.
        """
        sharded_model = model.sharded_model
        if not issubclass(sharded_model.model_class, BERT):
            raise UserError(f"filling masks needs a bert, and the model is a {model.family}")
        if sharded_model.stages > 1:
            raise UserError(
                f"filling masks needs a mesh without pipeline parallelism, and the mesh is {sharded_model.mesh_shape}"
            )
        self._model, self._sharded_model = model, sharded_model
        self._mask = special_id(model.tokenizer, MASK)
        self._rules = sharded_model.layout.rules.with_replicated_activations

    def fill(self, prompt: str, number: int = 5) -> list[list[Filling]]:
        """Returns, for each mask of a text in order, its most likely tokens in descending order; at most 20.

        The masks are filled independently: the model sees all of them as masks.

        Raises:
          UserError: the text has no mask, or is too long.
        """
        ids, longest = self._model.prompt_ids(prompt), self._sharded_model.config.model.sequence_length
        masks = [position for position, token in enumerate(ids) if token == self._mask]
        if not masks:
            mask = self._model.tokenizer.token(self._mask)
            raise UserError(f"the prompt has no {mask}: write one at each position that the bert should fill")
        if len(ids) > longest:
            raise UserError(f"the prompt has {len(ids)} tokens, and the model's maximum is {longest}: shorten it")
        found = self.most_likely(ids, masks)
        tokens, logprobs = np.asarray(found.top_ids), np.asarray(found.top_logprobs)
        return [
            [
                Filling(int(token), self._model.tokenizer.decode([token]).strip(), float(np.exp(logprob)))
                for token, logprob in zip(tokens[row, :number], logprobs[row, :number], strict=True)
            ]
            for row in range(len(masks))
        ]

    def most_likely(self, ids: Sequence[int], masks: Sequence[int]) -> SampledTokens:
        """Returns the most likely tokens at some positions of a text, one row for each, followed by padding rows."""
        # Lengths and numbers of masks are padded to powers of two, so that few programs are compiled.
        tokens = np.zeros((1, min(doubled(16, len(ids)), self._sharded_model.config.model.sequence_length)), np.int32)
        tokens[0, : len(ids)] = ids
        positions = np.zeros(doubled(1, len(masks)), np.int32)
        positions[: len(masks)] = masks
        return self._sharded_model.on_mesh(
            self._compiled, self._model.parameters, tokens, np.int32(len(ids)), positions
        )

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._traced)

    def _traced(self, parameters: Any, tokens: Array, count: Array, positions: Array) -> SampledTokens:
        with use_rules(self._rules):
            model = self._sharded_model.inference_model(parameters)
            assert isinstance(model, BERT)
            mask = (jnp.arange(tokens.shape[1]) < count).astype(jnp.int32)[None]
            batch = {"tokens": tokens, "token_types": None, "padding_mask": mask}
            # Before the head, whose products and logits are then of the masks alone.
            hidden = model.final_norm(run_sections(model, batch, None)[0].x)[:, positions]
            size, none = self._model.sharded_model.config.model.vocab_size, jnp.zeros(len(positions), jnp.int32)
            assert size is not None  # the embedding table has rows
            bias = model.head.bias[...]
            return score_tokens(model.head(hidden)[0], model.output_table[...], none, OutputOptions(size), bias)
