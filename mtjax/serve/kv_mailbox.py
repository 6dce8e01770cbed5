"""Ordered messages from one process to others, under numbered keys of JAX's coordination service."""

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import jax

from mtjax.runtime.processes.coordination import service

POLL_MS = 5000
"""Timeout of one attempt to read a message, after which it is repeated."""


def receive(prefix: str, *, only_reader: bool = False) -> Iterator[Any]:
    """Yields the messages under a key prefix in order, waiting for each; an `only_reader` deletes what it has read."""
    for count in itertools.count():
        key = f"{prefix}/{count}"
        message = _wait_for(key)
        if only_reader:
            # The coordination service keeps all keys in memory.
            service().key_value_delete(key)
        yield json.loads(message)


def _wait_for(key: str) -> str:
    while True:
        try:
            return service().blocking_key_value_get(key, POLL_MS)
        except jax.errors.JaxRuntimeError as e:
            # jax has one exception for all errors of the service; only a timeout means that there is no message yet.
            if "DEADLINE_EXCEEDED" not in str(e):
                raise


class Sender:
    """Sends items under a key prefix from a separate thread, so that no caller waits for the service.

    A message is a list of items: those that arrive while a message is being sent are sent together in the next.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self._items = prefix, list[Any]()
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._send, name=f"sender {prefix}", daemon=True)
        self._thread.start()

    def send(self, item: Any) -> None:
        """Queues an item, a JSON value, from any thread."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def close(self) -> None:
        """Waits until all items are sent, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _send(self) -> None:
        for count in itertools.count():
            with self._changed:
                while not (self._items or self._closed):
                    self._changed.wait()
                # All that has come while the last message was sent: a step's tokens need one message.
                items, self._items = self._items, []
            if not items:
                return
            try:
                service().key_value_set(f"{self._prefix}/{count}", json.dumps(items))
            except jax.errors.JaxRuntimeError:  # the service ended with process 0; `Peers` ends this process
                return
