"""Text exchange between the processes of a run: barriers with a name and a timeout, over jax's coordination service."""

import itertools
import os
import socket
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mtjax.errors import UserError, first_line

TIMEOUT = 600
"""Seconds that a process waits for the others at a barrier."""

_barrier_numbers = itertools.count()
"""Numbers the barriers of this process; every process reaches them in the same order."""


def all_gather_text(name: str, text: str, timeout: float = TIMEOUT) -> list[str]:
    """Returns every process's text, by process. All processes call it in the same order, in their main threads.

    Args:
      name: of the barrier, for messages.
      text: the text of this process.
      timeout: seconds.

    Raises:
      UserError: not all processes reached the barrier in time; names the missing ones.
    """
    if num_processes() == 1:
        return [text]
    return gather_text_at(f"{next(_barrier_numbers)}", name, text, timeout)


def gather_text_at(key: str, name: str, text: str, timeout: float) -> list[str]:
    """Gathers texts as `all_gather_text` does, from any thread, at a barrier `key` that each process reaches once.

    Raises:
      UserError: not all processes reached the barrier in time; names the missing ones.
    """
    client = service()
    key = f"mtjax/{key}/{name.replace(' ', '_')}"
    # Set before the barrier, after which the texts of all processes are there.
    client.key_value_set(f"{key}/{this_process()}", text)
    try:
        client.wait_at_barrier(key, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as e:
        # A process without a text has not reached this point.
        missing = sorted(set(range(num_processes())) - set(_read_texts(client, key)))
        if missing:
            who = ", ".join(map(str, missing))
            message = f"process {who} did not reach the barrier '{name}' within {timeout:.0f} s"
        else:
            message = f"the processes lost their connection at the barrier '{name}'"
        raise UserError(f"{message}: {first_line(e)}") from e
    texts = _read_texts(client, key)
    return [texts[process] for process in range(num_processes())]


def describe_process() -> str:
    """Describes this process for messages, after its number: `gpu-7, pid 4711`."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def num_processes() -> int:
    """Returns the number of processes; unlike `jax.process_count` it does not initialize the devices."""
    return distributed.global_state.num_processes


def this_process() -> int:
    """Returns the rank of this process, from 0."""
    return distributed.global_state.process_id


def service() -> Any:
    """Returns the client of jax's coordination service: a key-value store with barriers."""
    client = distributed.global_state.client
    assert client is not None, "only several processes have a client"
    return client


def _read_texts(client: Any, barrier: str) -> dict[int, str]:
    """Returns the texts that processes have set for a barrier, by process."""
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(f"{barrier}/")}
