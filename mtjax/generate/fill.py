"""A BERT fills masks: the most likely tokens for each, from one pass over the text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.errors import UserError
from mtjax.generate.sampling import SampledTokens, score_tokens
from mtjax.generate.shapes import doubled
from mtjax.generate.weights import LoadedModel, special_id
from mtjax.models.families.bert import BERT
from mtjax.models.trunk import run_sections
from mtjax.sharding.axes import use_rules

MASK = "[MASK]"


@dataclass(frozen=True)
class Filling:
    """What may stand in place of a mask."""

    token: int
    text: str
    probability: float
    """By the model, of this token alone."""


class Filler:
    """A BERT on a mesh. A program is compiled for each length of texts, doubled from 16 on, and number of masks."""

    def __init__(self, model: LoadedModel) -> None:
        """Keeps the weights.

        Raises:
          UserError: the model is not a BERT, the vocabulary has no mask, or the mesh has stages.
        """
        placed = model.placed
        if not issubclass(placed.family, BERT):
            raise UserError(f"a {model.family} writes text and fills no masks; bert does")
        if placed.stages > 1:
            raise UserError(f"filling masks needs a mesh without stages, and this one is {placed.shape}")
        self._model, self._placed = model, placed
        self._mask = special_id(model.tokenizer, MASK)
        self._rules = placed.layout.rules.with_whole_samples

    def fill(self, prompt: str, number: int = 5) -> list[list[Filling]]:
        """For each mask of a text, in their order, the most likely tokens, the first one first; at most 20.

        Each mask is filled as if the others stayed masks.

        Raises:
          UserError: there is no mask, or the text is too long.
        """
        ids, longest = self._model.prompt_ids(prompt), self._placed.config.model.sequence_length
        masks = [at for at, token in enumerate(ids) if token == self._mask]
        if not masks:
            raise UserError(f"the prompt has no {MASK}, and a BERT fills these: write one")
        if len(ids) > longest:
            raise UserError(f"the prompt has {len(ids)} tokens, and the model reads at most {longest}")
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
        """The most likely tokens at some places of a text, a row for each place; rows behind are filling."""
        tokens = np.zeros((1, min(doubled(16, len(ids)), self._placed.config.model.sequence_length)), np.int32)
        tokens[0, : len(ids)] = ids
        places = np.zeros(doubled(1, len(masks)), np.int32)
        places[: len(masks)] = masks
        return self._placed.on_mesh(self._compiled, self._model.parameters, tokens, np.int32(len(ids)), places)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._traced)

    def _traced(self, parameters: Any, tokens: Array, count: Array, places: Array) -> SampledTokens:
        with use_rules(self._rules):
            model = self._placed.inference_model(parameters)
            assert isinstance(model, BERT)
            mask = (jnp.arange(tokens.shape[1]) < count).astype(jnp.int32)[None]
            batch = {"tokens": tokens, "token_types": None, "padding_mask": mask}
            hidden = model.final_norm(run_sections(model, batch, None)[0].x)[:, places]
            size, none = self._model.placed.config.model.vocab_size, jnp.zeros(len(places), jnp.int32)
            assert size is not None  # the table has rows
            return score_tokens(model.head(hidden)[0], model.output_table[...], none, size, model.head.bias[...])
