"""uvicorn around the application: where it listens, and how it ends."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mtjax.errors import UserError, first_line
from mtjax.serve.app import make_app
from mtjax.serve.service import Service

KEEP_ALIVE_SECONDS = 30
HEADER_SECONDS = 30
"""That a client has to send the headers of a request."""
BACKLOG = 1024
LAST_ANSWERS = 5
"""Seconds for answers that are being sent when the engine has stopped."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that has its address, and does not listen yet.

    Raises:
      UserError: the address is not this machine's, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as closed:
            bound = closed.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            closed.pop_all()
    except (OSError, UnicodeError) as e:
        raise UserError(f"can't listen at {host} port {port}: {first_line(e)}") from e
    return bound


def address_of(bound: socket.socket) -> str:
    """http://HOST:PORT."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Protocol(H11Protocol):
    """HTTP of one connection, which ends where the headers of a request take too long; uvicorn would wait for ever."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for headers."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Goes on waiting as long as headers are not complete."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is waited for."""
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._send_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _send_timeout(self) -> None:
        if not self.transport.is_closing():
            body = f"the headers did not come within {HEADER_SECONDS} s\n".encode()
            head = f"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()


class Server(uvicorn.Server):
    """Serves until it is told to stop; then what is under way is finished, and nothing new is taken.

    Args:
      service: what is served.
      drain_seconds: for what is under way.
      ready: called when requests are taken.
    """

    def __init__(self, service: Service, drain_seconds: float, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=Protocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=LAST_ANSWERS,
            )
        )
        self._host, self._drain_seconds, self._ready = service.host, drain_seconds, ready
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the engine, then listens."""
        self._loop = asyncio.get_running_loop()
        self._host.start(on_failure=self._begin_to_drain)
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections and the engine."""
        self._host.draining = True
        self._host.fail_pending()
        await super().shutdown(sockets)
        await asyncio.to_thread(self._host.stop)

    def drain(self) -> None:
        """Begins to end; from any thread, and from a signal's handler."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._host.draining = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._host.idle.wait()
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and the first Ctrl-C drain; uvicorn itself would end by the signal afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of the signals."""
        if self._loop is None:  # nothing has begun
            raise SystemExit(0)
        self.drain()
