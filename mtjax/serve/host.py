"""The bridge between the engines' threads and asyncio: each engine runs in its own thread, clients await events."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mtjax.errors import UserError, first_line
from mtjax.generate.beams import Beam, BeamSearch
from mtjax.generate.completion import Piece
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.serve.api_error import ApiError
from mtjax.serve.metrics import Metrics
from mtjax.serve.replicas import ReplicaEngine

SHUTTING_DOWN = "the server is shutting down: try again later"
SEND_GRACE_SECONDS = 10.0
"""Time after a response's deadline until which it may still be sent to a slow client."""


class TextEvent(NamedTuple):
    """A new piece of one of a response's texts, or the end of that text."""

    text: int
    """Index of the text in the response."""
    piece: Piece | None
    """None: the text has ended."""
    is_prompt: bool = False
    """Whether the piece is part of the prompt."""


class PendingResponse:
    """The texts of one HTTP request. It belongs to the event loop in which it was created.

    Args:
      seconds: timeout.

    Attributes:
      requests: the engine requests, by the index of the text.
    """

    def __init__(self, seconds: float) -> None:
        self._loop, self._seconds = asyncio.get_running_loop(), seconds
        # A single deadline for all events: a timeout for each would let a slow text go on forever.
        self._deadline = self._loop.time() + seconds
        self._queue: asyncio.Queue[TextEvent | ApiError] = asyncio.Queue()
        self.requests: dict[int, Request] = {}

    def put_event(self, event: TextEvent) -> None:
        """Puts an event into the queue that `events` reads, from any thread."""
        self.call_in_loop(self._queue.put_nowait, event)

    def fail(self, error: ApiError) -> None:
        """Makes `events` raise an error."""
        self._queue.put_nowait(error)

    def call_in_loop(self, function: Any, *arguments: Any) -> None:
        """Calls a function in the event loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client is left
            # asyncio's queues are not safe from other threads.
            self._loop.call_soon_threadsafe(function, *arguments)

    async def events(self) -> AsyncIterator[TextEvent]:
        """Yields events until all texts have ended.

        Raises:
          ApiError: the timeout has expired, or the engine has failed.
        """
        ended = 0
        while ended < len(self.requests):
            try:
                async with asyncio.timeout_at(self._deadline):
                    event = await self._queue.get()
            except TimeoutError:
                message = f"the request timed out after {self._seconds:g} s: ask for fewer tokens"
                raise ApiError(504, message) from None
            if isinstance(event, ApiError):
                raise event
            ended += event.piece is None
            yield event

    def send_timeout(self) -> asyncio.Timeout:
        """Returns a context for sending the response, which times out some seconds after the deadline."""
        return asyncio.timeout_at(self._deadline + SEND_GRACE_SECONDS)

    async def done(self) -> None:
        """Waits until all texts have ended.

        Raises:
          ApiError: as in `events`.
        """
        async for _ in self.events():
            pass


class Host:
    """Runs one engine thread per replica, and submits each text to the replica with the lowest load.

    Args:
      engines: one for each replica; nothing else may call them.
      sequences: number of slots of each.
      most_waiting: maximum number of texts in the queues, in addition to those in slots.

    Attributes:
      metrics: Prometheus metrics.
      failure: the exception that has ended an engine's thread; None if none has.
      draining: whether new requests are rejected.
      idle: set while no text is in flight.
    """

    def __init__(self, engines: Sequence[ReplicaEngine], sequences: int, most_waiting: int) -> None:
        self._engines, self._engine = tuple(engines), engines[0]
        # Limited here and not by the engines' queues, so that the texts of a request are accepted all together or not
        # at all.
        self._max_texts = sequences * len(engines) + most_waiting
        self.metrics = Metrics([lambda engine=engine: engine.load for engine in engines], sequences)
        self.failure: BaseException | None = None
        self.draining = False
        self._in_flight = 0
        self._pending: set[PendingResponse] = set()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(engine,), name=f"engine {number}", daemon=True)
            for number, engine in enumerate(engines)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self.idle = asyncio.Event()

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a sequence, prompt included."""
        return self._engine.max_context

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the encoder reads the prompt, as in T5, so that it takes no space from the generated text."""
        return self._engine.is_encoder_decoder

    @property
    def max_texts(self) -> int:
        """Maximum number of texts of one HTTP request."""
        return self._max_texts

    def start(self, on_failure: Callable[[], object] = lambda: None) -> None:
        """Compiles the programs that every text needs, and starts the engines' threads.

        Args:
          on_failure: called in the running event loop if an engine fails.
        """
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        for engine in self._engines:  # engines of other processes start to compile right away, in parallel
            # Two tokens: the first comes from prefill, the second from a decode step.
            engine.submit(Request((0,), Sampling(max_tokens=2)))
        for engine in self._engines:
            engine.run()
        self.idle.set()
        for thread in self._threads:
            thread.start()

    def fail_pending(self) -> None:
        """Cancels all texts in flight, and answers their requests with status 503."""
        for pending in list(self._pending):
            pending.fail(ApiError(503, SHUTTING_DOWN))
            self.cancel(pending)

    def stop(self) -> None:
        """Stops the engines' threads as soon as they have no work left."""
        self._stopped.set()
        for engine in self._engines:
            engine.wake()
        for thread in self._threads:
            thread.join()

    def submit(self, pending: PendingResponse, requests: Sequence[Request]) -> None:
        """Submits all texts of a response, or none of them.

        Raises:
          ApiError: the server is shutting down, its queue is full, or one of the prompts is invalid.
        """
        self._check_capacity(len(requests))
        self._pending.add(pending)
        now = time.perf_counter()
        try:
            for index, request in enumerate(requests):
                # Chosen for each text: the n texts of a request are spread over the replicas.
                replica = self._least_busy()
                counted = self._with_metrics(pending, index, request, now, replica)
                self._engines[replica].submit(counted)
                # `cancel` needs the request that the engine has, and engines compare by identity.
                pending.requests[index] = counted
                self._in_flight += 1
                self.idle.clear()
                self.metrics.prompt_tokens.inc(len(request.prompt))
        except UserError as e:
            # Texts before the invalid one were submitted already.
            self.cancel(pending)
            raise ApiError(400, str(e), "prompt") from e

    def search(
        self, pending: PendingResponse, beams: BeamSearch, prompt: tuple[int, ...], max_tokens: int
    ) -> list[Beam]:
        """Submits a beam search as a response's only text; the first replica runs nothing else meanwhile.

        Returns:
          A list that will have the beams once the response is done.

        Raises:
          ApiError: the server is shutting down, or its queue is full.
        """
        assert isinstance(self._engine, Engine)  # the caller has checked `decoder`
        self._check_capacity(1)
        self._pending.add(pending)
        start, found = time.perf_counter(), list[Beam]()

        def job() -> None:
            # The client may have gone while the job was waiting.
            if pending in self._pending:
                found.extend(beams.search(prompt, max_tokens, lambda: pending not in self._pending))
            self.metrics.request_seconds.observe(time.perf_counter() - start)
            self.metrics.finished.labels("stop" if found and found[0].is_stopped else "length").inc()
            pending.put_event(TextEvent(0, None))
            pending.call_in_loop(self._on_ended)

        pending.requests[0] = Request(prompt)  # not submitted: makes `events` wait for one text
        self._in_flight += 1
        self.idle.clear()
        self.metrics.prompt_tokens.inc(len(prompt))
        self._engine.submit_job(job)
        return found

    @property
    def decoder(self) -> GenerationPrograms | None:
        """The first replica's decoder, for beam search; None if the replica spans multiple processes."""
        return self._engine.decoder if isinstance(self._engine, Engine) else None

    def cancel(self, pending: PendingResponse) -> None:
        """Cancels the remaining texts of a response whose client has disconnected or has been answered."""
        # Before the engines are told: a waiting beam search sees that its client has gone.
        self._pending.discard(pending)
        for request in pending.requests.values():
            for engine in self._engines:  # engines that do not have the request ignore it
                engine.cancel(request)

    def _least_busy(self) -> int:
        """Returns the index of the engine with the fewest waiting and running texts."""
        return min(range(len(self._engines)), key=lambda number: sum(self._engines[number].load))

    def _check_capacity(self, texts: int) -> None:
        """Checks that so many more texts may be submitted.

        Raises:
          ApiError: the engine has failed, the server is shutting down, or there would be too many texts.
        """
        if self.failure is not None:
            raise self._failure_error()
        if self.draining:
            raise ApiError(503, SHUTTING_DOWN)
        if texts > self._max_texts:
            message = f"the request has {texts} texts (prompts times n), and the server's maximum is {self._max_texts}"
            raise ApiError(400, f"{message}: send fewer")
        if self._in_flight + texts > self._max_texts:
            message = f"the queue is full: {self._in_flight} texts in flight, of at most {self._max_texts}"
            raise ApiError(429, f"{message}: try again later")

    def _with_metrics(
        self, pending: PendingResponse, index: int, request: Request, start: float, replica: int
    ) -> Request:
        """Returns a request that also updates the metrics, and puts the end of the text into the response's events."""
        metrics, last = self.metrics, start

        def on_token(token: Token) -> bool:
            nonlocal last
            now = time.perf_counter()
            # `last` is still the object `start` when the first token arrives.
            (metrics.time_to_first_token if last is start else metrics.time_per_token).observe(now - last)
            last = now
            metrics.count_token(replica)
            return request.on_token(token)

        def on_end(reason: FinishReason) -> None:
            request.on_end(reason)
            metrics.finished.labels(reason).inc()
            metrics.request_seconds.observe(time.perf_counter() - start)
            pending.put_event(TextEvent(index, None))
            pending.call_in_loop(self._on_ended)

        return replace(request, on_token=on_token, on_end=on_end)

    def _on_ended(self) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self.idle.set()

    def _run(self, engine: ReplicaEngine) -> None:
        try:
            engine.run(self._stopped)
        except BaseException as e:  # for example, out of memory: all clients get the error, and the process ends
            self.failure = e
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._fail_all)

    def _fail_all(self) -> None:
        self.idle.set()
        for pending in self._pending:
            pending.fail(self._failure_error())
        self._on_failure()

    def _failure_error(self) -> ApiError:
        assert self.failure is not None
        return ApiError(503, f"the engine has failed: {first_line(self.failure)}")
