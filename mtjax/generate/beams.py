"""Beam search: the continuations that are most probable as a whole, as far as a few side by side find them.

As transformers' `generate(num_beams=...)` with its defaults: a finished beam's score is its log-probability divided by
its length to the power of `length_penalty`, and the search ends when no running beam is better than the worst finished.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from mtjax.errors import UserError
from mtjax.generate.decoder import Cache, Decoder, Sequences, encoder_input, prompt_chunk
from mtjax.generate.engine import sampling_batch
from mtjax.generate.request import Sampling
from mtjax.generate.sampling import MOST_LIKELY, SampledTokens
from mtjax.generate.shapes import CHUNKS, chunk_length, doubled


@dataclass(frozen=True)
class Beam:
    """A continuation."""

    ids: tuple[int, ...]
    """With the stop id that ended it, if one did."""
    score: float
    """Natural log-probability of the whole, over its length to the power of the penalty."""
    is_stopped: bool


@dataclass(frozen=True)
class BeamSearch:
    """How beams are searched, of one prompt at a time.

    Args:
      decoder: the model.
      beams: that are written side by side.
      length_penalty: above 0 favours long continuations, below 0 short ones.
      stop_ids: tokens that end a continuation.
      chunks: static lengths of a prompt's chunks.
      shortest_cache: the cache has room for this many tokens of each beam, or 2, 4, 8, ... times as many.

    Raises:
      UserError: a rank does not report enough candidates for so many beams and stop ids.
    """

    decoder: Decoder
    beams: int
    length_penalty: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    chunks: tuple[int, ...] = CHUNKS
    min_cache_length: int = 128
    megatron_stopping: bool = False
    """The search ends when the best candidate of a step, if only one that ends there, is no better than the worst
    finished; else when the best running one is not, as with transformers."""

    def __post_init__(self) -> None:
        most = MOST_LIKELY // (self.candidates // self.beams)
        if self.beams > most:
            ends = f" with {len(self.stop_ids)} stop ids" if len(self.stop_ids) > 1 else ""
            raise UserError(f"{self.beams} beams are too many: at most {most}{ends}")

    @property
    def candidates(self) -> int:
        """Continuations that are looked at in each step: enough for all beams if some of them end."""
        return max(2, 1 + len(self.stop_ids)) * self.beams

    def search(
        self, prompt: Sequence[int], max_tokens: int, is_cancelled: Callable[[], bool] = lambda: False
    ) -> list[Beam]:
        """The best continuations, the best one first: at most as many as beams, of what was found if it is cancelled.

        Raises:
          UserError: the prompt is empty or leaves no room in the context.
        """
        reads_text, longest = self.decoder.is_encoder_decoder, self.decoder.max_sequence_length
        start = (self.decoder.start_id,) if reads_text else tuple(prompt)
        most_read = self.decoder.config.model.sequence_length if reads_text else longest - 1
        if not prompt or len(prompt) > most_read:
            raise UserError(f"the prompt has {len(prompt)} tokens, and must have from 1 to {most_read}")
        most = min(max_tokens, longest - len(start))
        search = _Search(self, most)
        length = doubled(self.min_cache_length, max(len(prompt) + self.chunks[-1], len(start) + most))
        cache, state, drawn = self._prefill(tuple(prompt), start, *self.decoder.empty(self.beams, length))
        active = jnp.ones(self.beams, bool)
        while search.extend(drawn) and not is_cancelled():
            cache, state = self.decoder.reorder(cache, state, search.sources, search.newest)
            cache, state, drawn = self.decoder.decode(cache, state, active)
        return search.finished

    def _prefill(
        self, prompt: tuple[int, ...], start: tuple[int, ...], cache: Cache, state: Sequences
    ) -> tuple[Cache, Sequences, SampledTokens]:
        draws, drawn = sampling_batch(Sampling(), logprobs=True), None
        if self.decoder.is_encoder_decoder:
            length = doubled(self.chunks[0], len(prompt))
            chunk = prompt_chunk(start, 0, 1, 0, draws)
            cache, state, drawn, _ = self.decoder.prefill_encoder(cache, state, encoder_input(prompt, length), chunk)
            return cache, state, drawn
        at = 0
        while at < len(start):
            length = chunk_length(self.chunks, len(start) - at)
            cache, state, drawn, _ = self.decoder.prefill(
                cache, state, prompt_chunk(start, at, length, 0, draws), False
            )
            at += length
        assert drawn is not None  # a prompt has tokens
        return cache, state, drawn


class _Search:
    """The beams of one prompt.

    Attributes:
      sources: which beam each of the running ones continues.
      newest: their newest tokens.
      finished: the best that have ended.
    """

    def __init__(self, options: BeamSearch, most: int) -> None:
        self._options, self._most = options, most
        self._running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        self.finished: list[Beam] = []
        self.sources = self.newest = np.zeros(options.beams, np.int32)

    def extend(self, drawn: SampledTokens) -> bool:
        """Extends the running beams by one token each; returns whether the search goes on."""
        options, beams = self._options, self._options.beams
        found = self._best(np.asarray(drawn.top_ids), np.asarray(drawn.top_logprobs))
        length = len(self._running[0][0]) + 1
        is_last = length == self._most
        ends = [is_last or token in options.stop_ids for _, token, _ in found]
        for (source, token, score), has_ended in list(zip(found, ends, strict=True))[:beams]:
            if has_ended:  # those behind the first are there only to take the places of these
                ids, is_stopped = (*self._running[source][0], token), token in options.stop_ids
                self.finished.append(Beam(ids, score / length**options.length_penalty, is_stopped))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[:beams]
        continuing = [each for each, has_ended in zip(found, ends, strict=True) if not has_ended][:beams]
        if is_last:
            return False
        self._running = [((*self._running[source][0], token), score) for source, token, score in continuing]
        self.sources = np.array([source for source, _, _ in continuing], np.int32)
        self.newest = np.array([token for _, token, _ in continuing], np.int32)
        best = (found[0][2] if options.megatron_stopping else self._running[0][1]) / length**options.length_penalty
        return len(self.finished) < beams or best > self.finished[-1].score

    def _best(self, likely: np.ndarray, logprobs: np.ndarray) -> list[tuple[int, int, float]]:
        """(beam, token, score) of the best candidates, in descending order."""
        scores = np.array([score for _, score in self._running], np.float32)[:, None] + logprobs[: len(self._running)]
        order = np.argsort(-scores, axis=None, kind="stable")[: self._options.candidates]
        rows, columns = np.unravel_index(order, scores.shape)
        return [(int(row), int(likely[row, at]), float(scores[row, at])) for row, at in zip(rows, columns, strict=True)]
