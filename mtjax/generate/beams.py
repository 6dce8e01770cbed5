"""Beam search for the continuations with the highest probability.

Equivalent to transformers' `generate(num_beams=...)` with its defaults: a finished beam's score is its log-probability
divided by its length to the power of `length_penalty`, and the search ends when no running beam scores higher than the
worst finished one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mtjax.errors import UserError
from mtjax.generate.decoder import Cache, GenerationPrograms, Sequences, encoder_input, prompt_chunk
from mtjax.generate.engine import sampling_batch
from mtjax.generate.request import Sampling
from mtjax.generate.sampling import MOST_LIKELY, SampledTokens
from mtjax.generate.shapes import CHUNKS, chunk_length, doubled


@dataclass(frozen=True)
class Beam:
    """A continuation."""

    ids: tuple[int, ...]
    """Token ids, including the stop token that ended the beam, if any."""
    score: float
    """Natural log-probability divided by length ** length_penalty."""
    is_stopped: bool


@dataclass(frozen=True)
class BeamSearch:
    """Parameters of a beam search, which runs one prompt at a time.

    Args:
      decoder: the model.
      beams: number of beams.
      length_penalty: values above 0 favor long continuations, below 0 short ones.
      stop_ids: tokens that end a continuation.
      chunks: static lengths of prompt chunks.
      min_cache_length: the cache holds this many tokens of each beam, or 2, 4, 8, ... times as many.

    Raises:
      UserError: the sampler reports too few candidates (`MOST_LIKELY`) for so many beams and stop tokens.
    """

    decoder: GenerationPrograms
    beams: int
    length_penalty: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    chunks: tuple[int, ...] = CHUNKS
    min_cache_length: int = 128
    megatron_stopping: bool = False
    """Whether the search stops as in Megatron-LM: it compares the worst finished beam with the best candidate of a
    step, even one that ends there; transformers compares it with the best running beam."""

    def __post_init__(self) -> None:
        most = MOST_LIKELY // (self.candidates // self.beams)
        if self.beams > most:
            with_stops = f" with {len(self.stop_ids)} stop tokens" if len(self.stop_ids) > 1 else ""
            raise UserError(f"beam search with {self.beams} beams: the maximum is {most}{with_stops}")

    @property
    def candidates(self) -> int:
        """Candidates of each step: enough to continue all beams even if some candidates end with a stop token."""
        return max(2, 1 + len(self.stop_ids)) * self.beams

    def search(
        self, prompt: Sequence[int], max_tokens: int, is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[Beam]:
        """Returns the best continuations in descending order of score: at most `beams`, fewer if it is cancelled.

        Raises:
          UserError: the prompt is empty or fills the context.
        """
        # The cache has one length from the start, as a search is not batched with other requests: with space for the
        # padding of the prompt's last chunk, which is at most one chunk, and for all tokens to be generated.
        is_encoder_decoder, longest = self.decoder.is_encoder_decoder, self.decoder.max_sequence_length
        start = (self.decoder.start_id,) if is_encoder_decoder else tuple(prompt)
        longest_prompt = self.decoder.config.model.sequence_length if is_encoder_decoder else longest - 1
        if not prompt or len(prompt) > longest_prompt:
            raise UserError(f"the prompt has {len(prompt)} tokens, and must have from 1 to {longest_prompt}")
        most = min(max_tokens, longest - len(start))
        search = _Search(self, most)
        length = doubled(self.min_cache_length, max(len(prompt) + self.chunks[-1], len(start) + most))
        # Only slot 0 has the prompt: the first candidates all continue it, and the first `reorder` copies it to all
        # slots.
        cache, state, drawn = self._prefill(tuple(prompt), start, *self.decoder.empty(self.beams, length))
        active = jnp.ones(self.beams, bool)
        while search.extend(drawn) and not is_cancelled():
            # The candidates' source beams become the slots: beam i continues a copy of slot sources[i].
            cache, state = self.decoder.reorder(cache, state, search.sources, search.newest)
            cache, state, drawn = self.decoder.decode(cache, state, active)
        return search.finished

    def _prefill(
        self, prompt: tuple[int, ...], start: tuple[int, ...], cache: Cache, state: Sequences
    ) -> tuple[Cache, Sequences, SampledTokens]:
        """Prefills the prompt into slot 0; returns cache, decode state and the candidates after the prompt."""
        draws, drawn = sampling_batch(Sampling(), logprobs=True), None
        if self.decoder.is_encoder_decoder:
            length = doubled(self.chunks[0], len(prompt))
            # The decoder's prompt is its start token alone.
            chunk = prompt_chunk(start, 0, 1, 0, draws)
            cache, state, drawn, _ = self.decoder.prefill_encoder(cache, state, encoder_input(prompt, length), chunk)
            return cache, state, drawn
        position = 0
        while position < len(start):
            length = chunk_length(self.chunks, len(start) - position)
            cache, state, drawn, _ = self.decoder.prefill(
                cache, state, prompt_chunk(start, position, length, 0, draws), False
            )
            position += length
        assert drawn is not None  # a prompt has tokens
        return cache, state, drawn


class _Search:
    """The state of the search for one prompt.

    Attributes:
      sources: for each running beam, the index of the beam that it extends.
      newest: the newest token of each running beam.
      finished: the best beams that have ended.
    """

    def __init__(self, options: BeamSearch, most: int) -> None:
        self._options, self._most = options, most
        # One beam, not `beams` equal ones: these would all be continued alike.
        self._running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self.finished: list[Beam] = []
        self.sources = self.newest = np.zeros(options.beams, np.int32)

    def extend(self, drawn: SampledTokens) -> bool:
        """Extends each running beam by one token; returns whether the search continues."""
        options, beams = self._options, self._options.beams
        # All candidates of a step have the same length, so their scores need no length penalty to be compared.
        found = self._best(np.asarray(drawn.top_ids), np.asarray(drawn.top_logprobs))
        length = len(self._running[0][0]) + 1
        is_last = length == self._most
        # At the maximum length every candidate is a finished beam, as in transformers.
        ends = [is_last or token in options.stop_ids for _, token, _ in found]
        for (source, token, score), has_ended in list(zip(found, ends, strict=True))[:beams]:
            if has_ended:  # candidates after the first `beams` only replace ended ones as running beams
                ids, is_stopped = (*self._running[source][0], token), token in options.stop_ids
                # score = log p(text) / length ** length_penalty
                self.finished.append(Beam(ids, score / length**options.length_penalty, is_stopped))
        # The sort is stable: of equal scores the beam that ended first stays.
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:beams]
        continuing = [each for each, has_ended in zip(found, ends, strict=True) if not has_ended][:beams]
        if is_last:
            return False
        self._running = [((*self._running[source][0], token), score) for source, token, score in continuing]
        self.sources = np.array([source for source, _, _ in continuing], np.int32)
        self.newest = np.array([token for _, token, _ in continuing], np.int32)
        # The bound assumes that a running beam ends at its present length; with a penalty above 0 a longer text could
        # still score higher. transformers stops here too, unless early_stopping is "never".
        best = (found[0][2] if options.megatron_stopping else self._running[0][1]) / length**options.length_penalty
        return len(self.finished) < beams or best > self.finished[-1].score

    def _best(self, likely: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, int, float]]:
        """Returns (beam, token, score) of the best candidates in descending order of score."""
        # In float32, as transformers adds them: sums in float64 could order near ties differently.
        scores = np.array([score for _, score in self._running], np.float32)[:, None] + logprobs[: len(self._running)]
        order = np.argsort(-scores, axis=None, kind="stable")[: self._options.candidates]
        rows, columns = np.unravel_index(order, scores.shape)
        return [
            (int(row), int(likely[row, column]), float(scores[row, column]))
            for row, column in zip(rows, columns, strict=True)
        ]
