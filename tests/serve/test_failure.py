"""Errors that clients get if the device fails or takes too long."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mtjax.generate.engine import Engine
from mtjax.serve.host import Host
from mtjax.serve.server import HTTPServer, address_of, listen
from tests.serve.asking import JSON, send
from tests.serve.conftest import KEY


class Failing(Engine):
    """Fails at the first request after the warm-up request."""

    def __init__(self) -> None:
        self.max_context, self._asked, self._count = 96, threading.Event(), 0

    load, is_encoder_decoder = (0, 0), False

    def submit(self, request) -> None:
        self._count += 1
        self._asked.set()

    def cancel(self, request) -> None: ...

    def wake(self) -> None: ...

    def run(self, stopped=None) -> None:
        if stopped is not None:
            assert self._asked.wait(300)
            raise RuntimeError("out of memory")
        self._asked.clear()


class Silent(Failing):
    """Never generates a token; records cancelled requests."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled, self._stopped = [], threading.Event()

    def cancel(self, request) -> None:
        self.cancelled.append(request)

    def wake(self) -> None:
        self._stopped.set()

    def run(self, stopped=None) -> None:
        assert stopped is None or self._stopped.wait(300)


@contextmanager
def running(live, engine: Engine, **limits: float) -> Iterator[tuple[str, Host, HTTPServer, threading.Thread]]:
    """Runs a server with a fake engine."""
    host = Host([engine], 4, 0)
    bound, ready = listen("127.0.0.1", 0), threading.Event()
    own = {"host": host, "limits": dataclasses.replace(live.service.limits, **limits)}
    server = HTTPServer(dataclasses.replace(live.service, **own), 0.1, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    assert ready.wait(300)
    yield address_of(bound), host, server, thread
    thread.join(300)
    bound.close()
    assert not thread.is_alive()


HEADERS = JSON | {"Authorization": f"Bearer {KEY}"}


def test_clients_get_an_error_if_the_device_fails(live) -> None:
    with running(live, Failing()) as (address, host, _, _):
        answer = send(address, "POST", "/v1/completions", b'{"prompt": "the cat"}', HEADERS)
        assert answer.status == 503 and "the engine has failed: out of memory" in answer.text
    assert isinstance(host.failure, RuntimeError)  # which the command raises


def test_request_timeout(live) -> None:
    """The error is a status or, in a stream, an event; the request is cancelled."""
    engine = Silent()
    with running(live, engine, seconds=0.3) as (address, _, server, _):
        message = "the request timed out after 0.3 s: ask for fewer tokens"
        for path, method, body in (
            ("/v1/completions", "POST", b'{"prompt": "the cat"}'),
            ("/v1/chat/completions", "POST", b'{"messages": [{"role": "user", "content": "the cat"}]}'),
            ("/api", "PUT", b'{"prompts": ["the cat"]}'),
        ):
            answer = send(address, method, path, body, HEADERS)
            assert answer.status == 504 and message in answer.text, path
        answer = send(address, "POST", "/v1/completions", b'{"prompt": "the cat", "stream": true}', HEADERS)
        assert answer.status == 200 and message in answer.text and '"code":504' in answer.text
        assert "data: [DONE]" not in answer.text
        for _ in range(1000):  # the engine may hear of it behind the client
            if len(engine.cancelled) == 4:
                break
            time.sleep(0.01)
        assert len(engine.cancelled) == 4
        server.drain()
