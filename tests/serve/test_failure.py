"""A device that fails: clients hear of it, and the server ends."""

import asyncio
import dataclasses
import threading

from mtjax.generate.engine import Engine
from mtjax.serve.host import Host
from mtjax.serve.server import Server, address_of, listen
from tests.serve.asking import JSON, send
from tests.serve.conftest import KEY


class Failing(Engine):
    """Fails at the first request behind the one that warms it up."""

    def __init__(self) -> None:
        self.max_context, self._asked, self._count = 96, threading.Event(), 0

    load = (0, 0)

    def submit(self, request) -> None:
        self._count += 1
        self._asked.set()

    def cancel(self, request) -> None: ...

    def wake(self) -> None: ...

    def run(self, stopped=None) -> None:
        if stopped is not None:
            assert self._asked.wait(60)
            raise RuntimeError("out of memory")
        self._asked.clear()


def test_clients_hear_of_a_device_that_fails(live) -> None:
    host = Host(Failing(), 1, 0)
    bound, ready = listen("127.0.0.1", 0), threading.Event()
    server = Server(dataclasses.replace(live.service, host=host), 10, ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
    thread.start()
    assert ready.wait(60)
    headers = JSON | {"Authorization": f"Bearer {KEY}"}
    answer = send(address_of(bound), "POST", "/v1/completions", b'{"prompt": "the cat"}', headers)
    assert answer.status == 503 and "the engine has failed: out of memory" in answer.text
    thread.join(60)
    bound.close()
    assert not thread.is_alive() and isinstance(host.failure, RuntimeError)  # which the command raises
