"""Words between the processes of a run: meetings with a name and a time-out, over jax's coordination service."""

import itertools
import os
import socket
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mtjax.errors import UserError, first_line

TIMEOUT = 600
"""Seconds that a process waits for the others at a meeting."""

_meetings = itertools.count()
"""Numbers the meetings of this process, which every process holds in the same order; it lives as long as the client."""


def all_gather_text(name: str, word: str, timeout: float = TIMEOUT) -> list[str]:
    """Every process's word, by process. All processes call it, in the same order, in their main threads.

    Args:
      name: of the meeting, for messages.
      word: what this process has to say.
      timeout: seconds.

    Raises:
      UserError: not all processes came in time; says which.
    """
    if num_processes() == 1:
        return [word]
    return gather_text_at(f"{next(_meetings)}", name, word, timeout)


def gather_text_at(place: str, name: str, word: str, timeout: float) -> list[str]:
    """`exchange` in any thread, at a place where each of several processes comes once.

    Raises:
      UserError: not all processes came in time; says which.
    """
    client = service()
    place = f"mtjax/{place}/{name.replace(' ', '_')}"
    client.key_value_set(f"{place}/{this_process()}", word)
    try:
        client.wait_at_barrier(place, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as e:
        missing = sorted(set(range(num_processes())) - set(_words(client, place)))
        who = f"process {', '.join(map(str, missing))} did not come" if missing else "the processes lost each other"
        raise UserError(f"at the meeting '{name}' {who} within {timeout:.0f} s: {first_line(e)}") from e
    words = _words(client, place)
    return [words[process] for process in range(num_processes())]


def whereabouts() -> str:
    """This process, as messages name it after its number: `gpu-7, pid 4711`."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def num_processes() -> int:
    """How many processes the run has; unlike `jax.process_count` it does not need devices, which come later."""
    return distributed.global_state.num_processes


def this_process() -> int:
    """The number of this process, from 0."""
    return distributed.global_state.process_id


def service() -> Any:
    """The client of jax's coordination service, which keeps words under keys and holds barriers."""
    client = distributed.global_state.client
    assert client is not None, "only several processes have a client"
    return client


def _words(client: Any, place: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): word for key, word in client.key_value_dir_get(f"{place}/")}
