"""Texts of a Retro, which reads neighbours: the whole model runs again for every token.

As in Megatron-LM up to 0.15, without a KV cache: one program of the model's sequence length, for some texts at a time.
Neighbours are given by the caller, or a retriever finds those of each chunk when it is complete.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import reshard

from mtjax.config.sizes import padded_vocab_size
from mtjax.data.neighbours.given import ends_in_front, first_with_passages, tokens_of_texts
from mtjax.data.progress import say
from mtjax.errors import UserError, shortened
from mtjax.families.retro.config import neighbour_length, num_chunks
from mtjax.families.retro.model import NEIGHBOURS as ARRAY
from mtjax.families.retro.model import Retro
from mtjax.generate.completion import Completion
from mtjax.generate.engine import sampling_batch, to_tokens
from mtjax.generate.request import FinishReason, Sampling, Token
from mtjax.generate.sampling import IN_PROMPT, SampledTokens, SamplingBatch, sample_tokens
from mtjax.generate.weights import LoadedModel
from mtjax.models.language_model import run_sections
from mtjax.retrieval.retriever import NeighbourSource, Retriever
from mtjax.sharding.axes import spec, use_rules

NEIGHBOURS, PASSAGES, WITHOUT = "neighbours", "passages", "without_documents"
"""Keys of a line: a list of texts for each chunk of the prompt, a list of texts that the whole answer reads, and the
documents that a retriever leaves out."""


@dataclass(eq=False)
class Reading:
    """A prompt and what is read with it.

    Attributes:
      ids: tokens of the prompt.
      neighbours: of all chunks of the context, int32[chunks, k, r]; those of a retriever are filled in as they are
        found. None where the model reads none.
      without: documents that a retriever leaves out.
      front: ends of documents in front of the prompt, which are not part of it.
      sources: what it found for each chunk so far.
    """

    ids: list[int]
    neighbours: np.ndarray | None
    without: frozenset[int] = frozenset()
    front: int = 0
    sources: list[list[NeighbourSource]] = field(default_factory=list)


@dataclass(eq=False)
class _Row:
    """A text that is being written."""

    completion: Completion
    reading: Reading
    draws: SamplingBatch
    generated: int = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the text so far."""
        return len(self.reading.ids) + self.generated


class NeighbourWriter:
    """A Retro on a mesh DATAxMODEL.

    Two programs are compiled: with neighbours, and without any, which is a GPT's.
    """

    def __init__(
        self, model: LoadedModel, rows: int = 1, retriever: Retriever | None = None, without: Iterable[str] = ()
    ) -> None:
        """Stores the model.

        Args:
          model: with its parameters.
          rows: texts that are written at a time.
          retriever: finds the neighbours of chunks, unless they are given.
          without: documents that it leaves out for all texts, as `Retriever.document` reads them.

        Raises:
          UserError: the retriever's database has no such document.
        """
        self._model, self._sharded_model, self._config = model, model.sharded_model, model.sharded_model.config.model
        self._rules = model.sharded_model.layout.rules.with_replicated_activations
        self._rows, self._retriever = rows, retriever
        self._without = frozenset(retriever.document(name) for name in without) if retriever else frozenset[int]()
        longest, vocab = self._config.sequence_length, padded_vocab_size(self._config)
        self._tokens, self._counts = np.zeros((rows, longest), np.int32), np.zeros((rows, vocab), np.int32)
        self._idle = sampling_batch(Sampling(), logprobs=False)
        self._has_cut = False

    def read(self, prompt: Sequence[int], line: Mapping[str, Any]) -> Reading:
        """Returns a prompt's tokens and the neighbours of all chunks.

        A prompt with passages gets ends of documents in front, so that the answer begins with a chunk.

        Args:
          prompt: its tokens.
          line: may have `neighbours` or `passages`; with a retriever, `without_documents`.

        Raises:
          UserError: they are not lists of texts, or more than the model reads; the prompt has no tokens, or leaves none
            for the text; the database has no such document.
        """
        model, ids = self._config, list(prompt)
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        given = [name for name in (NEIGHBOURS, PASSAGES) if name in line]
        if self._retriever is not None:
            if given:
                raise UserError(
                    f"the line has {given[0]}, and --retrieve searches for neighbours: remove one of the two"
                )
            # Ends of documents until a chunk is complete, as training has for chunks without neighbours.
            reading = Reading(ids, self._texts_of([]), self._without | self._documents(line))
        elif WITHOUT in line:
            raise UserError(f"the line has {WITHOUT}, which are those of --retrieve: add that, or remove them")
        elif not given:
            reading = Reading(ids, None)
        else:
            reading = self._given(ids, line)
        if len(reading.ids) >= model.sequence_length:
            raise UserError(
                f"the prompt has {len(reading.ids)} tokens with those in front of it, and the context is "
                f"{model.sequence_length}: shorten it"
            )
        return reading

    def _given(self, ids: list[int], line: Mapping[str, Any]) -> Reading:
        model = self._config
        if NEIGHBOURS in line and PASSAGES in line:
            raise UserError("the line has neighbours and passages: give one of them")
        if PASSAGES in line:
            if not _are_texts(line[PASSAGES]):
                raise UserError(
                    f'"passages" is {shortened(line[PASSAGES])}, and must be a list of texts: ["one", "two"]'
                )
            front, neighbours = ends_in_front(len(ids), model.retro_chunk), self._texts_of([])
            neighbours[first_with_passages(len(ids), model.retro_chunk) :] = self._tokens_of(line[PASSAGES])
            return Reading([self._model.tokenizer.eod] * front + ids, neighbours, front=front)
        by_chunk = line[NEIGHBOURS]
        is_list = isinstance(by_chunk, list) and all(_are_texts(each) for each in by_chunk)
        if not is_list:
            raise UserError(
                f'"neighbours" is {shortened(by_chunk)}, and must be a list of texts for each chunk of the prompt: '
                '[["one", "two"], []]'
            )
        if len(by_chunk) > (most := num_chunks(model)):
            raise UserError(f'"neighbours" has {len(by_chunk)} chunks, and the model has {most}: give at most as many')
        return Reading(ids, self._texts_of(by_chunk))

    def _texts_of(self, by_chunk: Sequence[Sequence[str]]) -> np.ndarray:
        """Returns the tokens of each chunk's texts; ends of documents where there are none."""
        model, tokenizer = self._config, self._model.tokenizer
        out = np.full((num_chunks(model), model.retro_num_neighbours, neighbour_length(model)), tokenizer.eod, np.int32)
        for chunk, texts in enumerate(by_chunk):
            out[chunk] = self._tokens_of(texts)
        return out

    def _tokens_of(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the tokens of a chunk's texts; says the first time that one is truncated."""
        out, is_cut = tokens_of_texts(texts, self._config, self._model.tokenizer)
        if is_cut and not self._has_cut:
            say(f"a given text has more than {out.shape[-1]} tokens and is truncated: the model reads so many of each")
        self._has_cut |= is_cut
        return out

    def _documents(self, line: Mapping[str, Any]) -> frozenset[int]:
        """Returns the documents that a line leaves out."""
        names = line.get(WITHOUT, [])
        if not isinstance(names, list) or not all(type(name) in (int, str) for name in names):
            raise UserError(f'"{WITHOUT}" is {shortened(names)}, and must be a list of documents: [3, "books:12"]')
        assert self._retriever is not None
        return frozenset(self._retriever.document(str(name)) for name in names)

    def complete(self, completion: Completion, reading: Reading) -> None:
        """Generates a text, and calls the listeners of the completion's request; see `run`."""
        self.run([(completion, reading)])

    def run(self, texts: Iterable[tuple[Completion, Reading]]) -> None:
        """Generates texts, some at a time, and calls the listeners of their completions' requests.

        Args:
          texts: each with what `read` returned; taken as there is place for them.
        """
        waiting, running = iter(texts), dict[int, _Row]()
        while True:
            for row in range(self._rows):
                if row not in running and (text := next(waiting, None)) is not None:
                    running[row] = self._begin(row, *text)
            if not running:
                return
            if self._retriever is not None:
                self._retrieve(running, self._retriever)
            # Two batches, as the programs with and without neighbours differ. A Retro without neighbours skips its
            # encoder; it does not read empty ones.
            for reads in (False, True):
                rows = {row: text for row, text in running.items() if (text.reading.neighbours is not None) == reads}
                if rows:
                    for row in self._step(rows):
                        del running[row]

    def _begin(self, row: int, completion: Completion, reading: Reading) -> _Row:
        self._tokens[row], self._counts[row] = 0, 0
        self._tokens[row, : len(reading.ids)] = reading.ids
        # Ends of documents in front of a prompt are not the user's: a repetition penalty must not count them.
        self._counts[row, np.unique(reading.ids[reading.front :])] = IN_PROMPT
        return _Row(completion, reading, sampling_batch(completion.request.sampling, completion.request.logprobs))

    def _retrieve(self, running: Mapping[int, _Row], retriever: Retriever) -> None:
        """Finds the neighbours of all chunks that are complete: the next token is the first that reads them."""
        size = self._config.retro_chunk
        done = [
            (row, text.reading, chunk)
            for row, text in running.items()
            # `sources` has an entry for each chunk that was searched for.
            for chunk in range(len(text.reading.sources), text.length // size)
        ]
        if not done:
            return
        chunks = [self._tokens[row, chunk * size : (chunk + 1) * size] for row, _, chunk in done]
        found = retriever.find(chunks, [reading.without for _, reading, _ in done])
        for (_, reading, chunk), numbers, distances in zip(done, *found, strict=True):
            assert reading.neighbours is not None
            reading.neighbours[chunk] = retriever.tokens(numbers)
            reading.sources.append(retriever.sources(numbers, distances))

    def _step(self, rows: Mapping[int, _Row]) -> list[int]:
        """Writes a token of each of these texts, which all read neighbours or all read none; returns those that
        ended."""
        # A batch always has all rows, so that one program serves; rows without a text are computed and ignored.
        texts, ended = [rows.get(row) for row in range(self._rows)], []
        draws = jax.tree.map(lambda *a: np.concatenate(a), *(text.draws if text else self._idle for text in texts))
        generated = np.array([text.generated if text else 0 for text in texts], np.int32)
        # The last token's hidden state is at length - 1, which must be inside the row.
        lengths = np.array([text.length if text else 1 for text in texts], np.int32)
        read = {row: text.reading.neighbours for row, text in rows.items() if text.reading.neighbours is not None}
        batch = {"tokens": self._tokens}
        if read:
            none = np.zeros_like(next(iter(read.values())))
            batch[ARRAY] = np.stack([read.get(row, none) for row in range(self._rows)])
        draws = dataclasses.replace(draws, draw_index=generated)
        drawn = self._sharded_model.on_mesh(self._compiled, self._model.parameters, batch, lengths, draws, self._counts)
        with_logprobs = any(text.completion.request.logprobs for text in rows.values())
        tokens = to_tokens(drawn, np.asarray(drawn.token).tolist(), with_logprobs)
        for row, text in rows.items():
            request = text.completion.request
            token = tokens[row] if request.logprobs else Token(tokens[row].id)
            reason: FinishReason | None = None
            if token.id in request.stop_ids or request.on_token(token):
                reason = "stop"
            else:
                self._tokens[row, text.length] = token.id
                self._counts[row, token.id] += 1
                text.generated += 1
                if text.generated == request.sampling.max_tokens or text.length == self._config.sequence_length:
                    reason = "length"
            if reason is not None:
                request.on_end(reason)
                ended.append(row)
        return ended

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._traced)

    def _traced(
        self, parameters: Any, batch: dict[str, Array], lengths: Array, draws: SamplingBatch, counts: Array
    ) -> SampledTokens:
        with use_rules(self._rules):
            model = self._sharded_model.inference_model(parameters)
            assert isinstance(model, Retro)
            # Attention is causal: the zeros after a row's text do not change its last hidden state.
            hidden = model.final_hidden(run_sections(model, batch, None)[0].x)
            (table, bias), output = model.output_parameters, model.logit_options(self._config.vocab_size or 0)
            last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)[:, 0]
            return sample_tokens(last, table, reshard(counts, spec("batch", "vocab")), draws, output, bias)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
