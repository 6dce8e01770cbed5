"""Engines in threads of their own, and what clients wait for: the bridge between the device and asyncio."""

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
from mtjax.generate.decoder import Decoder
from mtjax.generate.engine import Engine
from mtjax.generate.request import ENDED, Request, Sampling, Token
from mtjax.serve.api_error import ApiError
from mtjax.serve.metrics import Metrics
from mtjax.serve.replicas import Asked

STOPPING = "the server stops: try again later"
GRACE = 10.0
"""Seconds beyond its time that an answer has to reach its client."""


class TextEvent(NamedTuple):
    """What became of one of a ticket's texts."""

    text: int
    """Its number."""
    piece: Piece | None
    """None: it has ended."""
    is_prompt: bool = False
    """Whether the piece is of the prompt."""


class PendingResponse:
    """The texts that one request over HTTP asks for. It belongs to the loop that made it.

    Args:
      seconds: after which nobody waits any longer.
    """

    def __init__(self, seconds: float) -> None:
        self._loop, self._seconds = asyncio.get_running_loop(), seconds
        self._deadline = self._loop.time() + seconds
        self._news: asyncio.Queue[TextEvent | ApiError] = asyncio.Queue()
        self.open: dict[int, Request] = {}

    def tell(self, news: TextEvent) -> None:
        """Puts news where `news` finds them; from any thread."""
        self.call(self._news.put_nowait, news)

    def refuse(self, refused: ApiError) -> None:
        """Ends the wait with an error."""
        self._news.put_nowait(refused)

    def call(self, function: Any, *arguments: Any) -> None:
        """Calls a function in the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    async def news(self) -> AsyncIterator[TextEvent]:
        """Pieces as they come, until all texts have ended.

        Raises:
          Refused: that took too long, or the engine has failed.
        """
        ended = 0
        while ended < len(self.open):
            try:
                async with asyncio.timeout_at(self._deadline):
                    news = await self._news.get()
            except TimeoutError:
                raise ApiError(504, f"it was not done within {self._seconds:g} s: ask for fewer tokens") from None
            if isinstance(news, ApiError):
                raise news
            ended += news.piece is None
            yield news

    def patience(self) -> asyncio.Timeout:
        """A context in which to send the answer, which ends a while after the deadline."""
        return asyncio.timeout_at(self._deadline + GRACE)

    async def done(self) -> None:
        """Waits until all texts have ended.

        Raises:
          Refused: as `news`.
        """
        async for _ in self.news():
            pass


class Host:
    """Runs engines, each in a thread: replicas of one model, of which a text goes to the one with the least to do.

    Args:
      engines: nobody else calls them.
      sequences: that each can write at a time.
      most_waiting: texts that wait at most, beyond those that are being written.
    """

    def __init__(self, engines: Sequence[Asked], sequences: int, most_waiting: int) -> None:
        self._engines, self._engine = tuple(engines), engines[0]
        self._most = sequences * len(engines) + most_waiting
        self.metrics = Metrics([lambda engine=engine: engine.load for engine in engines], sequences)
        self.failure: BaseException | None = None
        self.draining = False
        self._open = 0
        self._tickets: set[PendingResponse] = set()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(engine,), name=f"engine {number}", daemon=True)
            for number, engine in enumerate(engines)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self.idle = asyncio.Event()

    @property
    def max_context(self) -> int:
        """Tokens of the longest text, prompt included."""
        return self._engine.max_context

    @property
    def reads_text(self) -> bool:
        """Whether prompts take no room from the texts: a T5 answers them."""
        return self._engine.reads_text

    @property
    def most_texts(self) -> int:
        """Texts that one request may ask for."""
        return self._most

    def start(self, on_failure: Callable[[], object] = lambda: None) -> None:
        """Compiles what every text needs, and begins to work for the running loop.

        Args:
          on_failure: called in the loop when the device fails.
        """
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        for engine in self._engines:  # those of other processes begin at once
            engine.submit(Request((0,), Sampling(max_tokens=2)))
        for engine in self._engines:
            engine.run()
        self.idle.set()
        for thread in self._threads:
            thread.start()

    def refuse_rest(self) -> None:
        """Ends what is left."""
        for ticket in list(self._tickets):
            ticket.refuse(ApiError(503, STOPPING))
            self.cancel(ticket)

    def stop(self) -> None:
        """Ends the threads, once they have nothing left to do."""
        self._stopped.set()
        for engine in self._engines:
            engine.wake()
        for thread in self._threads:
            thread.join()

    def submit(self, ticket: PendingResponse, requests: Sequence[Request]) -> None:
        """Asks the engines for all of a ticket's texts, or for none.

        Raises:
          Refused: the server stops, has too much to do, or can't continue one of the prompts.
        """
        self._check_room(len(requests))
        self._tickets.add(ticket)
        now = time.perf_counter()
        try:
            for index, request in enumerate(requests):
                replica = self._least_busy()
                watched = self._watched(ticket, index, request, now, replica)
                self._engines[replica].submit(watched)
                ticket.open[index] = watched
                self._open += 1
                self.idle.clear()
                self.metrics.prompt_tokens.inc(len(request.prompt))
        except UserError as e:
            self.cancel(ticket)
            raise ApiError(400, str(e), "prompt") from e

    def search(
        self, ticket: PendingResponse, beams: BeamSearch, prompt: tuple[int, ...], max_tokens: int
    ) -> list[Beam]:
        """Asks for a ticket's only text, by a search that the first engine's other texts wait for.

        Returns:
          Where the beams will be when the ticket is done.

        Raises:
          Refused: the server stops, or has too much to do.
        """
        assert isinstance(self._engine, Engine)  # `decoder` was there
        self._check_room(1)
        self._tickets.add(ticket)
        start, found = time.perf_counter(), list[Beam]()

        def job() -> None:
            if ticket in self._tickets:
                found.extend(beams.search(prompt, max_tokens, lambda: ticket not in self._tickets))
            self.metrics.whole.observe(time.perf_counter() - start)
            self.metrics.texts.labels("stop" if found and found[0].is_stopped else "length").inc()
            ticket.tell(TextEvent(0, None))
            ticket.call(self._ended)

        ticket.open[0] = Request(prompt)  # what is waited for
        self._open += 1
        self.idle.clear()
        self.metrics.prompt_tokens.inc(len(prompt))
        self._engine.submit_job(job)
        return found

    @property
    def decoder(self) -> Decoder | None:
        """What searches beams: the first replica's; None where several processes share it, which only know requests."""
        return self._engine.decoder if isinstance(self._engine, Engine) else None

    def cancel(self, ticket: PendingResponse) -> None:
        """Ends what is left of a ticket; its client has gone, or was answered."""
        self._tickets.discard(ticket)
        for request in ticket.open.values():
            for engine in self._engines:  # one of them has it
                engine.cancel(request)

    def _least_busy(self) -> int:
        """The number of the engine with the fewest texts."""
        return min(range(len(self._engines)), key=lambda number: sum(self._engines[number].load))

    def _check_room(self, texts: int) -> None:
        if self.failure is not None:
            raise self._failed()
        if self.draining:
            raise ApiError(503, STOPPING)
        if texts > self._most:
            raise ApiError(400, f"{texts} texts are more than this server takes at once, {self._most}: ask less")
        if self._open + texts > self._most:
            raise ApiError(429, f"{self._open} texts are under way already, of at most {self._most}: try again later")

    def _watched(self, ticket: PendingResponse, index: int, request: Request, start: float, replica: int) -> Request:
        """A request that also tells the ticket of its end, and is counted."""
        metrics, last = self.metrics, start

        def on_token(token: Token) -> bool:
            nonlocal last
            now = time.perf_counter()
            (metrics.first if last is start else metrics.between).observe(now - last)
            last = now
            metrics.count_token(replica)
            return request.on_token(token)

        def on_end(why: ENDED) -> None:
            request.on_end(why)
            metrics.texts.labels(why).inc()
            metrics.whole.observe(time.perf_counter() - start)
            ticket.tell(TextEvent(index, None))
            ticket.call(self._ended)

        return replace(request, on_token=on_token, on_end=on_end)

    def _ended(self) -> None:
        self._open -= 1
        if not self._open:
            self.idle.set()

    def _run(self, engine: Asked) -> None:
        try:
            engine.run(self._stopped)
        except BaseException as e:  # of the device: every client hears of it, and the process ends
            self.failure = e
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._tell_failure)

    def _tell_failure(self) -> None:
        self.idle.set()
        for ticket in self._tickets:
            ticket.refuse(self._failed())
        self._on_failure()

    def _failed(self) -> ApiError:
        assert self.failure is not None
        return ApiError(503, f"the engine has failed: {first_line(self.failure)}")
