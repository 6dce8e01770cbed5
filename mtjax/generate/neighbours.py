"""Texts of a Retro, which reads neighbours that the caller gives: the whole model runs again for every token.

As in Megatron-LM up to 0.15, without a KV cache: one program of the model's sequence length, one text at a time.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import reshard

from mtjax.config.retro import neighbour_length, num_chunks
from mtjax.config.sizes import padded_vocab_size
from mtjax.errors import UserError, shortened
from mtjax.generate.completion import Completion
from mtjax.generate.engine import sampling_batch, to_tokens
from mtjax.generate.request import FinishReason
from mtjax.generate.sampling import IN_PROMPT, SampledTokens, SamplingBatch, sample_tokens
from mtjax.generate.weights import LoadedModel
from mtjax.models.families.retro import NEIGHBOURS as ARRAY
from mtjax.models.families.retro import Retro
from mtjax.models.trunk import run_sections
from mtjax.sharding.axes import spec, use_rules

NEIGHBOURS, PASSAGES = "neighbours", "passages"
"""Keys of a line: a list of texts for each chunk of the prompt, or a list of texts that the whole answer reads."""


class NeighbourWriter:
    """A Retro on a mesh DATAxMODEL.

    Two programs are compiled: with neighbours, and without any, which is a GPT's.
    """

    def __init__(self, model: LoadedModel) -> None:
        """Stores the model."""
        self._model, self._placed, self._config = model, model.placed, model.placed.config.model
        self._rules = model.placed.layout.rules.with_whole_samples

    def read(self, prompt: Sequence[int], line: Mapping[str, Any]) -> tuple[list[int], np.ndarray | None]:
        """Returns a prompt's tokens and the neighbours of all chunks, int32[chunks, k, r]; None where there are none.

        A prompt with passages gets ends of documents in front, so that the answer begins with a chunk.

        Args:
          prompt: its tokens.
          line: may have `neighbours` or `passages`.

        Raises:
          UserError: they are not lists of texts, or more than the model reads; the prompt has no tokens.
        """
        model, tokenizer, ids = self._config, self._model.tokenizer, list(prompt)
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        if NEIGHBOURS in line and PASSAGES in line:
            raise UserError("the line has neighbours and passages: give one of them")
        if NEIGHBOURS in line:
            by_chunk = line[NEIGHBOURS]
            is_list = isinstance(by_chunk, list) and all(_are_texts(each) for each in by_chunk)
            if not is_list:
                raise UserError(
                    f'"neighbours" is {shortened(by_chunk)}, and must be a list of texts for each chunk of the prompt: '
                    '[["one", "two"], []]'
                )
            if len(by_chunk) > (most := num_chunks(model)):
                raise UserError(
                    f'"neighbours" has {len(by_chunk)} chunks, and the model has {most}: give at most as many'
                )
        elif PASSAGES in line:
            if not _are_texts(line[PASSAGES]):
                raise UserError(
                    f'"passages" is {shortened(line[PASSAGES])}, and must be a list of texts: ["one", "two"]'
                )
            ids = [tokenizer.eod] * (-len(ids) % model.retro_chunk) + ids
            read = len(ids) // model.retro_chunk - 1
            by_chunk = [[]] * read + [line[PASSAGES]] * (num_chunks(model) - read)
        else:
            return ids, None
        out = np.full((num_chunks(model), model.retro_num_neighbours, neighbour_length(model)), tokenizer.eod, np.int32)
        for chunk, texts in enumerate(by_chunk):
            if len(texts) > model.retro_num_neighbours:
                raise UserError(
                    f"there are {len(texts)} texts for a chunk, and the model reads {model.retro_num_neighbours} "
                    "(retro_num_neighbours): give at most as many"
                )
            for number, text in enumerate(texts):
                tokens = tokenizer.encode(text)[: out.shape[-1]]
                out[chunk, number, : len(tokens)] = tokens
        return ids, out

    def complete(self, completion: Completion, ids: Sequence[int], neighbours: np.ndarray | None) -> None:
        """Generates a text, and calls the listeners of the completion's request.

        Args:
          completion: with its sampling parameters.
          ids: the prompt's tokens, as `read` returns them.
          neighbours: see `read`.

        Raises:
          UserError: the prompt leaves no tokens for the text.
        """
        request, longest = completion.request, self._config.sequence_length
        if len(ids) >= longest:
            raise UserError(
                f"the prompt has {len(ids)} tokens with those in front of it, and the context is {longest}: shorten it"
            )
        draws = sampling_batch(request.sampling, request.logprobs)
        tokens, end = np.zeros((1, longest), np.int32), len(ids)
        tokens[0, :end] = ids
        reason: FinishReason = "length"
        for index in range(min(request.sampling.max_tokens, longest - end)):
            counts = np.bincount(tokens[0, end : end + index], minlength=padded_vocab_size(self._config)).astype(
                np.int32
            )[None]
            counts[0, np.unique(tokens[0, :end])] |= IN_PROMPT
            draws = dataclasses.replace(draws, draw_index=jnp.full(1, index, jnp.int32))
            drawn = self._next(tokens, end + index, neighbours, draws, counts)
            token = int(drawn.token[0])
            if token in request.stop_ids or request.on_token(to_tokens(drawn, [token], request.logprobs)[0]):
                reason = "stop"
                break
            tokens[0, end + index] = token
        request.on_end(reason)

    def _next(
        self, tokens: np.ndarray, count: int, neighbours: np.ndarray | None, draws: SamplingBatch, counts: np.ndarray
    ) -> SampledTokens:
        read = {} if neighbours is None else {ARRAY: neighbours[None]}
        batch = {"tokens": tokens, **read}
        return self._placed.on_mesh(self._compiled, self._model.parameters, batch, np.int32(count), draws, counts)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._traced)

    def _traced(
        self, parameters: Any, batch: dict[str, Array], count: Array, draws: SamplingBatch, counts: Array
    ) -> SampledTokens:
        with use_rules(self._rules):
            model = self._placed.inference_model(parameters)
            assert isinstance(model, Retro)
            hidden = model.final_hidden(run_sections(model, batch, None)[0].x)
            table, bias, output = model.output_head(self._config.vocab_size or 0)
            last = lax.dynamic_index_in_dim(hidden[0], count - 1, keepdims=True)
            return sample_tokens(last, table, reshard(counts, spec("batch", "vocab")), draws, output, bias)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
