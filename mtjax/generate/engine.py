"""Continuous batching: requests join and leave a batch of sequences that is being written.

One thread owns the device: it calls `step` (or `run`) of an `Engine`. Any thread may `submit` and `cancel`; the queue
between them is bounded. Each step reads some chunks of prompts, and writes a token of every sequence whose prompt was
read: long prompts don't keep others waiting. Whole chunks with which some sequence of the cache begins, running or not,
are not read again.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from mtjax.errors import UserError
from mtjax.generate.decoder import Cache, Decoder, Sequences, cache_length, filled_text, prompt_chunk
from mtjax.generate.request import ENDED, Request, Sampling, Token
from mtjax.generate.sampling import LogitsParams, SampledTokens, SamplingBatch
from mtjax.generate.shapes import CHUNKS, chunk_length, doubled

LOOKAHEAD = 128
"""Tokens that a request will write, as far as the cache makes room ahead."""


class QueueFull(UserError):
    """More requests wait than the engine was told to hold."""


@dataclass(eq=False)
class _Running:
    """A request that has a sequence of the cache."""

    request: Request
    place: int
    """Of the sequence."""
    prompt: tuple[int, ...]
    """What the sequence begins with: the request's, or what a text begins with that answers it."""
    read: int = 0
    """Tokens of the prompt that are in the cache."""
    reused: int = 0
    """Those of them that were there before, or are another's."""
    written: int = 0
    scores: list[Token] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self.prompt) + self.written

    @property
    def is_written(self) -> bool:
        """Whether the prompt was read."""
        return self.read == len(self.prompt)


class Engine:
    """A decoder with requests.

    Args:
      decoder: the model.
      sequences: that are written at a time.
      most_waiting: requests that wait at most; None for any number.
      chunks: static lengths of a prompt's chunks; a chunk is filled up to the shortest that it fits.
      read_between: tokens of prompts after which no further chunk is read before the next step of the others.
      shortest_cache: the cache has room for this many tokens of each sequence, or 2, 4, 8, ... times as many: the
        least that the running requests need.

    Attributes:
      decoder: the one given.
      reused: tokens of prompts so far that were not read, as the cache had them.
      max_context: tokens of the longest sequence, prompt included; of a T5, of the longest text that it writes.
      reads_text: whether prompts are read apart from what is written, as a T5 does.
    """

    def __init__(
        self,
        decoder: Decoder,
        sequences: int = 8,
        *,
        most_waiting: int | None = None,
        chunks: tuple[int, ...] = CHUNKS,
        read_between: int = 512,
        shortest_cache: int = 128,
    ) -> None:
        self.decoder, self._chunks, self._shortest = decoder, tuple(sorted(chunks)), shortest_cache
        self.max_context, self.reads_text = decoder.longest_text, decoder.reads_text
        self._most_waiting, self._read_between = most_waiting, read_between
        self._free = list(range(sequences))
        self._held: list[tuple[int, ...]] = [()] * sequences
        self.reused = 0
        self._sequences = sequences
        self._running: dict[int, _Running] = {}
        self._waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._device: tuple[Cache, Sequences] | None = None
        self._active: tuple[tuple[int, ...], Any] | None = None

    # --- from any thread

    def submit(self, request: Request) -> None:
        """Puts a request into the queue.

        Raises:
          UserError: the prompt is empty, has an id that the vocabulary doesn't have, leaves no room in the context, or
            is to be echoed by a T5.
          QueueFull: too many wait.
        """
        self.check(request)
        with self._changed:
            if self._most_waiting is not None and len(self._waiting) >= self._most_waiting:
                raise QueueFull(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(request)
            self._changed.notify()

    def check(self, request: Request) -> None:
        """Checks that a request can be continued.

        Raises:
          UserError: the prompt is empty, has an id that the vocabulary doesn't have, leaves no room in the context, or
            is to be echoed by a T5.
        """
        ids, decoder, size = request.prompt, self.decoder, self.decoder.vocab_size
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        longest = decoder.config.model.sequence_length if decoder.reads_text else self.max_context - 1
        if len(ids) > longest:
            most = (
                f"the model reads at most {longest}"
                if decoder.reads_text
                else f"the model's context ends at {longest + 1}"
            )
            raise UserError(f"the prompt has {len(ids)} tokens, and {most}")
        if request.echo and decoder.reads_text:
            raise UserError("a t5's prompt is read and not continued: its tokens have no log-probabilities to echo")
        if wrong := next((i for i in ids if not 0 <= i < size), None):
            raise UserError(f"the prompt has the id {wrong}, and the vocabulary ends at {size - 1}")

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; does nothing to one that has ended."""
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify()

    def submit_job(self, job: Callable[[], None]) -> None:
        """Lets the thread that owns the device do something else with the decoder, before its next step."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        return len(self._waiting) + len(self._jobs), len(self._running)

    # --- alone

    def room(self, request: Request) -> int:
        """Tokens for which the cache has room when this request alone begins."""
        return doubled(self._shortest, self._need(_Running(request, 0, request.prompt)))

    def prefill_chunks(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Start and static length of each chunk in which a prompt is read."""
        start = 0
        while start < len(prompt):
            length = chunk_length(self._chunks, len(prompt) - start)
            yield start, length
            start += length

    # --- from the thread that owns the device

    def run(self, stopped: threading.Event | None = None) -> None:
        """Works until nothing is left to do; with `stopped`, waits for more until that is set and `wake` was called."""
        while True:
            if self.step():
                continue
            with self._changed:
                if stopped is None or stopped.is_set():
                    return
                if not (self._waiting or self._cancelled or self._jobs):
                    self._changed.wait()

    def wake(self) -> None:
        """Lets `run` look at `stopped`."""
        with self._changed:
            self._changed.notify_all()

    def step(self) -> bool:
        """Reads some chunks and writes a token of each sequence; returns whether there was anything to do."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
        if job is not None:
            job()
        self._admit()
        if not self._running:
            return job is not None
        self._make_room()
        writing = [running for running in self._running.values() if running.is_written]
        left = self._read_between
        while left > 0 and (reading := next((r for r in self._running.values() if not r.is_written), None)):
            left -= self._read_chunk(reading)
        self._write_tokens(writing)
        return True

    def _admit(self) -> None:
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            left = [request for request in self._waiting if request in cancelled]
            self._waiting = deque(request for request in self._waiting if request not in cancelled)
            joining = [self._waiting.popleft() for _ in range(min(len(self._free), len(self._waiting)))]
        for request in left:
            request.on_end("cancelled")
        for running in [r for r in self._running.values() if r.request in cancelled]:
            self._end(running, "cancelled")
        for request in joining:
            place = max(self._free, key=lambda place: self._shared(request, place))  # else the longest free
            self._free.remove(place)
            start = (self.decoder.start_id,) if self.decoder.reads_text else request.prompt
            self._running[place] = _Running(request, place, start)

    def _end(self, running: _Running, why: ENDED) -> None:
        del self._running[running.place]
        self._free.append(running.place)
        running.request.on_end(why)

    # --- the cache

    def _make_room(self) -> None:
        """Gives the cache the least length that the running requests need, or leaves it at up to four times that."""
        need = doubled(self._shortest, max(self._need(running) for running in self._running.values()))
        if self._device is None:
            self._device = self.decoder.empty(self._sequences, need)
            return
        cache, sequences = self._device
        length = cache_length(cache)
        if length < need or length > 4 * need:
            self._held = [held[:need] for held in self._held]
            self._device = self.decoder.resized(cache, need), sequences

    def _need(self, running: _Running) -> int:
        prompt = len(running.prompt)
        ahead = running.written + 1 + min(running.request.sampling.max_tokens - running.written, LOOKAHEAD)
        start = prompt // self._chunks[-1] * self._chunks[-1]
        filled = start + chunk_length(self._chunks, prompt - start)
        if self.decoder.reads_text:
            filled = self._text_length(running.request)
        return max(filled, min(prompt + ahead, self.max_context))

    def _text_length(self, request: Request) -> int:
        tokens = len(request.prompt)
        return doubled(chunk_length(self._chunks, tokens), tokens)

    def _shared(self, request: Request, place: int) -> int:
        """Tokens with which both a prompt and a sequence of the cache begin, whole chunks only, but not the last token.

        The sums of a chunk are rounded as they would be for this prompt. None where the prompt's tokens are scored, or
        counted.
        """
        if self.decoder.reads_text or request.echo or request.sampling.repetition_penalty != 1:
            return 0
        pairs = enumerate(zip(request.prompt[:-1], self._held[place], strict=False))
        shared = next((at for at, (own, held) in pairs if own != held), None)
        shared = min(len(request.prompt) - 1, len(self._held[place])) if shared is None else shared
        return shared // self._chunks[-1] * self._chunks[-1]

    def _reuse(self, running: _Running) -> None:
        """Takes over what some sequence has of a prompt that is about to be read."""
        places = sorted(range(self._sequences), key=lambda place: place != running.place)
        source = max(places, key=lambda place: self._shared(running.request, place))
        shared = self._shared(running.request, source)
        if shared and source != running.place:
            assert self._device is not None
            cache, sequences = self._device
            self._device = self.decoder.copy_sequence(cache, source, running.place), sequences
        running.read = running.reused = shared
        self._held[running.place] = running.prompt[:shared]
        self.reused += shared

    # --- tokens

    def _read_chunk(self, running: _Running) -> int:
        """Reads a chunk of a prompt, and writes the first token after the last one; returns the chunk's length."""
        if not running.read:
            self._reuse(running)
        request, prompt, start = running.request, running.prompt, running.read
        length = 1 if self.decoder.reads_text else chunk_length(self._chunks, len(prompt) - start)
        draws = sampling_batch(request.sampling, request.logprobs)
        chunk = prompt_chunk(prompt, start, length, running.place, draws, running.reused)
        assert self._device is not None
        if self.decoder.reads_text:
            length = self._text_length(request)
            text = filled_text(request.prompt, length)
            cache, sequences, drawn, scores = self.decoder.prefill_encoder(*self._device, text, chunk)
        else:
            cache, sequences, drawn, scores = self.decoder.prefill(*self._device, chunk, request.echo)
        self._device = cache, sequences
        running.read = min(start + length, len(prompt))
        self._held[running.place] = prompt[: running.read]
        if request.echo:
            running.scores += to_tokens(scores, prompt[start + 1 : start + length + 1])
        if running.is_written:
            if request.echo:
                request.on_prompt([Token(prompt[0]), *running.scores])
            self._tell(running, *to_tokens(drawn, np.asarray(drawn.token).tolist(), request.logprobs))
        return length

    def _write_tokens(self, writing: list[_Running]) -> None:
        if not writing:
            return
        places = tuple(sorted(running.place for running in writing))
        if self._active is None or self._active[0] != places:
            self._active = places, jnp.asarray(np.isin(np.arange(self._sequences), places))
        assert self._device is not None
        cache, sequences, drawn = self.decoder.decode(*self._device, self._active[1])
        self._device = cache, sequences
        tokens = np.asarray(drawn.token).tolist()
        with_logprobs = any(running.request.logprobs for running in writing)
        rows = to_tokens(drawn, tokens, with_logprobs)
        for running in writing:
            row = rows[running.place]
            self._tell(running, row if running.request.logprobs else Token(row.id))

    def _tell(self, running: _Running, token: Token) -> None:
        request = running.request
        running.written += 1
        if token.id in request.stop_ids or request.on_token(token):
            self._end(running, "stop")
        elif running.written >= request.sampling.max_tokens or running.length >= self.max_context:
            self._end(running, "length")


def sampling_batch(sampling: Sampling, logprobs: bool) -> SamplingBatch:
    """What a request asks of its first draw, as one row."""
    fractions = (sampling.temperature, sampling.top_p, sampling.min_p)
    temperature, top_p, min_p = (jnp.full(1, value, jnp.float32) for value in fractions)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    penalties = (jnp.full(1, value, jnp.float32) for value in penalties)
    warping = LogitsParams(temperature, jnp.full(1, sampling.top_k, jnp.int32), top_p, min_p, *penalties)
    words = np.array([[sampling.seed >> 32, sampling.seed & (2**32 - 1)]], np.uint32)
    return SamplingBatch(warping, jnp.asarray(words), jnp.zeros(1, jnp.int32), jnp.full(1, logprobs))


def to_tokens(drawn: SampledTokens, ids: Any, with_logprobs: bool = True) -> list[Token]:
    """Rows of what was drawn or scored as tokens: the first ones, with these ids."""
    if not with_logprobs:
        return [Token(i) for i in ids]
    own, likely, theirs = (np.asarray(a).tolist() for a in (drawn.logprob, drawn.likely, drawn.likely_logprobs))
    rows = zip(ids, own, likely, theirs, strict=False)
    return [Token(i, p, dict(zip(near, q, strict=True))) for i, p, near, q in rows]
