"""Continuous batching: requests join and leave a running batch of sequences between decode steps.

One thread owns the device: it calls `step` (or `run`) of an `Engine`. Any thread may `submit` and `cancel`; the queue
between them is bounded. Each step prefills some prompt chunks and decodes one token of every sequence that is already
prefilled, so that long prompts do not delay the other sequences. A prompt that begins with complete chunks which are in
the cache of any slot, active or free, reuses them (`mtjax.generate.prefix_cache`).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from mtjax.errors import UserError
from mtjax.generate.caches import Cache, cache_length
from mtjax.generate.decoder import GenerationPrograms, Sequences, encoder_input, prompt_chunk
from mtjax.generate.prefix_cache import PrefixCache
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.generate.sampling import LogitsParams, SampledTokens, SamplingBatch
from mtjax.generate.shapes import CHUNKS, chunk_length, doubled

LOOKAHEAD = 128
"""Tokens yet to be generated for which the cache reserves space in advance, at most, for each request."""


class QueueFull(UserError):
    """The engine's queue has reached its limit."""


@dataclass(eq=False)
class _Running:
    """A request that has a slot of the cache."""

    request: Request
    slot: int
    """Index of its sequence in the batch."""
    prompt: tuple[int, ...]
    """The decoder's first tokens: the request's prompt, or the start token of an encoder-decoder model."""
    prefilled: int = 0
    """Prompt tokens whose keys and values are in the cache."""
    reused: int = 0
    """Those of them that came from the prefix cache."""
    generated: int = 0
    prompt_tokens: list[Token] = field(default_factory=list)
    """The scored tokens of an echoed prompt."""

    @property
    def length(self) -> int:
        """Prompt tokens plus generated tokens."""
        return len(self.prompt) + self.generated

    @property
    def is_prefilled(self) -> bool:
        """Whether the entire prompt is in the cache."""
        return self.prefilled == len(self.prompt)


class Engine:
    """Schedules requests on a decoder with continuous batching.

    Args:
      decoder: the model.
      sequences: number of cache slots, the largest batch of a decode step.
      most_waiting: maximum number of queued requests; None for no limit.
      chunks: static lengths of prompt chunks; a chunk is padded to the shortest length that fits it.
      prefill_tokens_per_step: budget of a step: once this many prompt tokens were prefilled, the step decodes.
      min_cache_length: the cache holds this many tokens of each sequence, or 2, 4, 8, ... times as many: the smallest
        length that the running requests need.
      state_snapshots: maximum number of snapshots of recurrent states; None for the default of `PrefixCache`.

    Attributes:
      decoder: the model.
      max_context: maximum number of tokens of a sequence, prompt included; for an encoder-decoder model, of the
        decoder's sequence.
      is_encoder_decoder: whether the encoder reads the prompt, as in T5.
    """

    def __init__(
        self,
        decoder: GenerationPrograms,
        sequences: int = 8,
        *,
        most_waiting: int | None = None,
        chunks: tuple[int, ...] = CHUNKS,
        prefill_tokens_per_step: int = 512,
        min_cache_length: int = 128,
        state_snapshots: int | None = None,
    ) -> None:
        self.decoder, self._chunks, self._min_cache_length = decoder, tuple(sorted(chunks)), min_cache_length
        self.max_context, self.is_encoder_decoder = decoder.max_sequence_length, decoder.is_encoder_decoder
        self._most_waiting, self._prefill_tokens_per_step = most_waiting, prefill_tokens_per_step
        self._free_slots = list(range(sequences))
        self._prefixes = PrefixCache(decoder, sequences, self._chunks[-1], state_snapshots)
        self._sequences = sequences
        self._running: dict[int, _Running] = {}
        self._waiting: deque[Request] = deque()
        self._cancelled: set[Request] = set()
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._state: tuple[Cache, Sequences] | None = None
        self._active: tuple[tuple[int, ...], Any] | None = None

    # --- from any thread

    def submit(self, request: Request) -> None:
        """Appends a request to the queue.

        Raises:
          UserError: the prompt is empty, has a token id outside the vocabulary, fills the context, or is to be echoed
            by an encoder-decoder model.
          QueueFull: the queue has reached `most_waiting`.
        """
        self.check(request)
        with self._changed:
            if self._most_waiting is not None and len(self._waiting) >= self._most_waiting:
                raise QueueFull(f"the queue is full with {len(self._waiting)} waiting requests: try again later")
            self._waiting.append(request)
            self._changed.notify()

    def check(self, request: Request) -> None:
        """Checks that a request is valid for this model.

        Raises:
          UserError: the prompt is empty, has a token id outside the vocabulary, fills the context, or is to be echoed
            by an encoder-decoder model.
        """
        ids, decoder, size = request.prompt, self.decoder, self.decoder.vocab_size
        if not ids:
            raise UserError("the prompt has no tokens: give at least one")
        longest = decoder.config.model.sequence_length if decoder.is_encoder_decoder else self.max_context - 1
        if len(ids) > longest:
            limit = (
                f"the encoder's maximum is {longest}"
                if decoder.is_encoder_decoder
                else f"the model's context length is {longest + 1}"
            )
            raise UserError(f"the prompt has {len(ids)} tokens, and {limit}: shorten the prompt")
        if request.echo and decoder.is_encoder_decoder:
            raise UserError("echo needs a decoder-only model: a t5's prompt tokens have no log-probabilities")
        if wrong := next((i for i in ids if not 0 <= i < size), None):
            raise UserError(f"the prompt has the token id {wrong}, and the vocabulary has ids from 0 to {size - 1}")

    def cancel(self, request: Request) -> None:
        """Cancels a request before the next step; does nothing if it has already ended."""
        with self._changed:
            self._cancelled.add(request)
            self._changed.notify()

    def submit_job(self, job: Callable[[], None]) -> None:
        """Queues a function that the thread which owns the device calls before its next step."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of waiting and of running requests."""
        return len(self._waiting) + len(self._jobs), len(self._running)

    @property
    def reused(self) -> int:
        """Total number of prompt tokens that were served from the prefix cache."""
        return self._prefixes.reused

    # --- shapes, without running anything

    def cache_length_for(self, request: Request) -> int:
        """Returns the cache length, in tokens, with which this request starts if it is the only one."""
        return doubled(self._min_cache_length, self._required_length(_Running(request, 0, request.prompt)))

    def prefill_chunks(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields start and static length of each chunk in which a prompt is prefilled."""
        start = 0
        while start < len(prompt):
            length = chunk_length(self._chunks, len(prompt) - start)
            yield start, length
            start += length

    # --- from the thread that owns the device

    def run(self, stopped: threading.Event | None = None) -> None:
        """Steps until no work is left; with `stopped`, waits for more until it is set and `wake` is called."""
        while True:
            if self.step():
                continue
            with self._changed:
                if stopped is None or stopped.is_set():
                    return
                # Checked under the lock: a request that came after `step` has already notified, and no other would
                # wake this thread.
                if not (self._waiting or self._cancelled or self._jobs):
                    self._changed.wait()

    def wake(self) -> None:
        """Wakes `run` so that it checks `stopped`."""
        with self._changed:
            self._changed.notify_all()

    def step(self) -> bool:
        """Prefills some chunks and decodes a token of each prefilled sequence; returns whether there was any work."""
        with self._changed:
            job = self._jobs.popleft() if self._jobs else None
        if job is not None:
            job()
        self._admit()
        if not self._running:
            return job is not None
        self._resize_cache()
        # Selected before prefilling: a sequence whose last chunk is prefilled below already gets a token from it.
        decoding = [running for running in self._running.values() if running.is_prefilled]
        # The dict has requests in the order of the queue: one prompt is prefilled to its end before the next begins.
        # The last chunk may exceed the budget, or a budget below a chunk's length would never prefill anything.
        budget = self._prefill_tokens_per_step
        while budget > 0 and (prefilling := next((r for r in self._running.values() if not r.is_prefilled), None)):
            budget -= self._prefill_chunk(prefilling)
        self._decode(decoding)
        return True

    def _admit(self) -> None:
        """Ends cancelled requests and assigns free slots to waiting ones, in the order of the queue."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            dropped = [request for request in self._waiting if request in cancelled]
            self._waiting = deque(request for request in self._waiting if request not in cancelled)
            joining = [self._waiting.popleft() for _ in range(min(len(self._free_slots), len(self._waiting)))]
        # Listeners are called outside of the lock: they may submit or cancel.
        for request in dropped:
            request.on_end("cancelled")
        for running in [r for r in self._running.values() if r.request in cancelled]:
            self._end(running, "cancelled")
        for request in joining:
            slot = self._prefixes.best_slot(request, self._free_slots, None if self._state is None else self._state[0])
            self._free_slots.remove(slot)
            start = (self.decoder.start_id,) if self.decoder.is_encoder_decoder else request.prompt
            self._running[slot] = _Running(request, slot, start)

    def _end(self, running: _Running, reason: FinishReason) -> None:
        del self._running[running.slot]
        # At the end: `PrefixCache.best_slot` takes the first of equals, whose text is the least likely to be continued.
        self._free_slots.append(running.slot)
        running.request.on_end(reason)

    # --- the KV cache

    def _resize_cache(self) -> None:
        """Resizes the cache to the smallest length that the running requests need, unless it has 1 to 4 times that."""
        need = doubled(
            self._min_cache_length, max(self._required_length(running) for running in self._running.values())
        )
        if self._state is None:
            self._state = self.decoder.empty(self._sequences, need)
            return
        cache, sequences = self._state
        length = cache_length(cache)
        # Shrinking only below a quarter avoids copies (and new shapes to compile for) with each short request.
        if length < need or length > 4 * need:
            self._prefixes.truncate(need)
            self._state = self.decoder.resized(cache, need), sequences

    def _required_length(self, running: _Running) -> int:
        """Returns the tokens for which a sequence needs space: the padded prompt, and up to `LOOKAHEAD` new tokens."""
        prompt = len(running.prompt)
        ahead = running.generated + 1 + min(running.request.sampling.max_tokens - running.generated, LOOKAHEAD)
        # XLA: a dynamic_update_slice that does not fit is moved back until it does. A cache that is too short for the
        # padding of the last chunk would have the keys of the tokens before it overwritten.
        start = prompt // self._chunks[-1] * self._chunks[-1]
        padded = start + chunk_length(self._chunks, prompt - start)
        if self.decoder.is_encoder_decoder:
            padded = self._encoder_length(running.request)  # the cross-attention cache has the same length
        return max(padded, min(prompt + ahead, self.max_context))

    def _encoder_length(self, request: Request) -> int:
        """Returns the padded length of the encoder's input."""
        tokens = len(request.prompt)
        return doubled(chunk_length(self._chunks, tokens), tokens)

    # --- tokens

    def _prefill_chunk(self, running: _Running) -> int:
        """Prefills a chunk of a prompt, after the last one also samples the first token; returns the chunk's length."""
        request, prompt = running.request, running.prompt
        assert self._state is not None
        # Not when the slot was assigned: requests that were admitted in the same step may have prefilled this prefix
        # since.
        if not running.prefilled:
            cache, running.reused = self._prefixes.reuse(request, prompt, running.slot, self._state[0])
            self._state, running.prefilled = (cache, self._state[1]), running.reused
        start = running.prefilled
        length = 1 if self.decoder.is_encoder_decoder else chunk_length(self._chunks, len(prompt) - start)
        draws = sampling_batch(request.sampling, request.logprobs)
        chunk = prompt_chunk(prompt, start, length, running.slot, draws, running.reused)
        if self.decoder.is_encoder_decoder:
            length = self._encoder_length(request)
            text = encoder_input(request.prompt, length)
            cache, sequences, drawn, scores = self.decoder.prefill_encoder(*self._state, text, chunk)
        else:
            cache, sequences, drawn, scores = self.decoder.prefill(*self._state, chunk, request.echo)
        self._state = cache, sequences
        running.prefilled = min(start + length, len(prompt))
        self._prefixes.prefilled(request, prompt, running.prefilled, running.slot, cache)
        # The hidden state of a token scores the next one. Rows of padding have no id, and `to_tokens` drops them.
        if request.echo:
            running.prompt_tokens += to_tokens(scores, prompt[start + 1 : start + length + 1])
        if running.is_prefilled:
            if request.echo:
                request.on_prompt([Token(prompt[0]), *running.prompt_tokens])
            self._emit(running, *to_tokens(drawn, np.asarray(drawn.token).tolist(), request.logprobs))
        return length

    def _decode(self, decoding: list[_Running]) -> None:
        """Runs a decode step and emits a token of each of these sequences."""
        if not decoding:
            return
        slots = tuple(sorted(running.slot for running in decoding))
        if self._active is None or self._active[0] != slots:  # the mask stays on the device until the slots change
            self._active = slots, jnp.asarray(np.isin(np.arange(self._sequences), slots))
        assert self._state is not None
        cache, sequences, drawn = self.decoder.decode(*self._state, self._active[1])
        self._state = cache, sequences
        # The only wait for the device in a decode step. Log-probabilities are copied from it only if a request asks
        # for them.
        tokens = np.asarray(drawn.token).tolist()
        with_logprobs = any(running.request.logprobs for running in decoding)
        rows = to_tokens(drawn, tokens, with_logprobs)
        for running in decoding:
            # Before `_emit` counts the new token: its keys are written by the next step, which reads it.
            self._prefixes.decoded(running.slot, running.length)
            # A program reports log-probabilities of all rows or of none, so a row may have some that its request did
            # not ask for.
            row = rows[running.slot]
            self._emit(running, row if running.request.logprobs else Token(row.id))

    def _emit(self, running: _Running, token: Token) -> None:
        """Passes a token to the request's listener, and ends the request if it is the last one."""
        request = running.request
        running.generated += 1
        # Checked first: a stop token that is also the last one allowed ends with "stop".
        if token.id in request.stop_ids or request.on_token(token):
            self._end(running, "stop")
        elif running.generated >= request.sampling.max_tokens or running.length >= self.max_context:
            self._end(running, "length")


def sampling_batch(sampling: Sampling, logprobs: bool) -> SamplingBatch:
    """Builds the one-row batch of sampling parameters for a request's first draw."""
    fractions = (sampling.temperature, sampling.top_p, sampling.min_p)
    temperature, top_p, min_p = (jnp.full(1, value, jnp.float32) for value in fractions)
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    penalties = (jnp.full(1, value, jnp.float32) for value in penalties)
    warping = LogitsParams(temperature, jnp.full(1, sampling.top_k, jnp.int32), top_p, min_p, *penalties)
    # The two words of a Threefry key; jax has no 64-bit integers by default.
    seed = np.array([[sampling.seed >> 32, sampling.seed & (2**32 - 1)]], np.uint32)
    return SamplingBatch(warping, jnp.asarray(seed), jnp.zeros(1, jnp.int32), jnp.full(1, logprobs))


def to_tokens(drawn: SampledTokens, ids: Any, with_logprobs: bool = True) -> list[Token]:
    """Converts the first rows of sampled or scored tokens to `Token`s with these ids."""
    if not with_logprobs:
        return [Token(i) for i in ids]
    chosen, top_ids, top_logprobs = (np.asarray(a).tolist() for a in (drawn.logprob, drawn.top_ids, drawn.top_logprobs))
    # Not strict: a padded chunk has more rows than ids.
    rows = zip(ids, chosen, top_ids, top_logprobs, strict=False)
    return [Token(i, p, dict(zip(near, q, strict=True))) for i, p, near, q in rows]
