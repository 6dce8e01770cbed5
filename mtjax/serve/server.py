"""The uvicorn server: sockets, header timeouts and draining."""

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
"""Timeout for the headers of a request."""
BACKLOG = 1024
LAST_ANSWERS = 5
"""Seconds for responses that are still being sent when the engine has stopped."""


def listen(host: str, port: int) -> socket.socket:
    """Binds a socket that does not accept connections yet.

    Raises:
      UserError: the address is not available on this machine, or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as closed:
            bound = closed.enter_context(socket.socket(family, kind, protocol))
            # A restarted server can bind while connections of the previous one are in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            closed.pop_all()
    except (OSError, UnicodeError) as e:
        raise UserError(f"can't listen on {host} port {port}: {first_line(e)}") from e
    return bound


def address_of(bound: socket.socket) -> str:
    """Returns http://HOST:PORT of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Protocol(H11Protocol):
    """The HTTP protocol of a connection, with a timeout for a request's headers, which uvicorn lacks."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Starts the header timeout."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Passes data on; stops the timeout once the headers are complete."""
        super().data_received(data)
        # IDLE: h11 has not received all headers of the next request.
        if self.conn.their_state is h11.IDLE:
            self._start_timer()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timeout."""
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
            body = f"the headers were not received within {HEADER_SECONDS} s\n".encode()
            head = f"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()


class HTTPServer(uvicorn.Server):
    """Serves until it is drained: then new requests are rejected, and those in flight are finished.

    Args:
      service: the service.
      drain_seconds: time to finish requests in flight.
      ready: called when the server accepts requests.
    """

    def __init__(self, service: Service, drain_seconds: float, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                http=Protocol,
                # Nothing here uses WebSockets or ASGI's lifespan events.
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
        """Starts the engines, then accepts connections."""
        self._loop = asyncio.get_running_loop()
        self._host.start(on_failure=self._begin_to_drain)
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections and stops the engines."""
        self._host.draining = True
        # What is still in flight after --drain-seconds gets status 503, not a cut connection.
        self._host.fail_pending()
        await super().shutdown(sockets)
        # In a thread: it waits for the engines' threads, whose last events this loop must still pass on.
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
        """Installs `handle_exit` for SIGTERM and Ctrl-C; unlike uvicorn, does not raise the signal again afterwards."""
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
        """Starts to drain; before startup, exits."""
        if self._loop is None:  # nothing has begun
            raise SystemExit(0)
        # A second Ctrl-C does not come here: `mtjax.interrupt.CtrlC` ends the process.
        self.drain()
