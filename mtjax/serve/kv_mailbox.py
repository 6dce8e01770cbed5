"""Words from one process to others, in their order: at jax's coordination service, under numbered keys."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import jax

from mtjax.train.processes.coordination import service

POLL_MS = 5000
"""Of one look for a letter; then comes another."""


def receive(prefix: str, *, only_reader: bool = False) -> Iterator[Any]:
    """What is left at a place, as it comes; whoever reads alone takes it away."""
    for count in itertools.count():
        key = f"{prefix}/{count}"
        letter = _wait_for(key)
        if only_reader:
            service().key_value_delete(key)
        yield json.loads(letter)


def _wait_for(key: str) -> str:
    while True:
        try:
            return service().blocking_key_value_get(key, POLL_MS)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise


class Sender:
    """Leaves words at a place, from a thread of its own: nobody waits for the service.

    What gathers while a letter is being left goes with the next: letters are lists of words.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._items = prefix, list[Any]()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._send, name=f"sender {prefix}", daemon=True)
        self._thread.start()

    def send(self, item: Any) -> None:
        """Sends a word, from any thread; anything that JSON has."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def close(self) -> None:
        """Returns when all is sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _send(self) -> None:
        for count in itertools.count():
            with self._changed:
                while not (self._items or self._closed):
                    self._changed.wait()
                words, self._items = self._items, []
            if not words:
                return
            try:
                service().key_value_set(f"{self._prefix}/{count}", json.dumps(words))
            except jax.errors.JaxRuntimeError:  # it went with process 0, and `Peers` ends this one
                return
