"""Words between the processes of a run: meetings with a name and a time-out, over jax's coordination service."""

import itertools
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mtjax.errors import UserError, first_line

TIMEOUT = 600
"""Seconds that a process waits for the others at a meeting."""

_meetings = itertools.count()
"""Numbers the meetings of this process, which every process holds in the same order; it lives as long as the client."""


def exchange(name: str, word: str, timeout: float = TIMEOUT) -> list[str]:
    """Every process's word, by process. All processes call it, in the same order.

    Args:
      name: of the meeting, for messages.
      word: what this process has to say.
      timeout: seconds.

    Raises:
      UserError: not all processes came in time; says which.
    """
    if jax.process_count() == 1:
        return [word]
    client = distributed.global_state.client
    assert client is not None, "several processes have a client"
    place = f"mtjax/{next(_meetings)}/{name.replace(' ', '_')}"
    client.key_value_set(f"{place}/{jax.process_index()}", word)
    try:
        client.wait_at_barrier(place, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as e:
        missing = sorted(set(range(jax.process_count())) - set(_words(client, place)))
        who = f"process {', '.join(map(str, missing))} did not come" if missing else "the processes lost each other"
        raise UserError(f"at the meeting '{name}' {who} within {timeout:.0f} s: {first_line(e)}") from e
    words = _words(client, place)
    return [words[process] for process in range(jax.process_count())]


def _words(client: Any, place: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): word for key, word in client.key_value_dir_get(f"{place}/")}
