"""Text exchange between the processes of a run: barriers with a name and a timeout, over jax's coordination service."""

import itertools
import json
import os
import socket
from typing import Any

import jax
from jax._src import distributed  # the service's client has no public name

from mtjax.errors import UserError, first_line

TIMEOUT = 600
"""Seconds that a process waits for the others at a barrier."""

SAME_FILES = "give all machines the same files"
"""What to do where processes have read different files."""

_barrier_numbers = itertools.count()
"""Numbers the barriers of this process; every process reaches them in the same order."""


def all_gather_text(name: str, text: str, timeout: float = TIMEOUT, *, shown: str | None = None) -> list[str]:
    """Returns every process's text, by process. All processes call it in the same order, in their main threads.

    Args:
      name: of the barrier; the same in all processes, so without paths, which may be spelled differently.
      text: the text of this process.
      timeout: seconds.
      shown: what messages of this process call the barrier; its name if None.

    Raises:
      UserError: not all processes reached the barrier in time (names the missing ones), or one is at another barrier.
    """
    if num_processes() == 1:
        return [text]
    return gather_text_at(f"{next(_barrier_numbers)}", name, text, timeout, shown=shown)


def gather_text_at(key: str, name: str, text: str, timeout: float, *, shown: str | None = None) -> list[str]:
    """Gathers texts as `all_gather_text` does, from any thread, at a barrier `key` that each process reaches once.

    Raises:
      UserError: as `all_gather_text`.
    """
    client = service()
    # Without the name: processes at different barriers would wait for each other until the timeout.
    key = f"mtjax/{key}"
    # Set before the barrier, after which the texts of all processes are there.
    client.key_value_set(f"{key}/{this_process()}", json.dumps([name, text]))
    try:
        client.wait_at_barrier(key, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as e:
        # A process without a text has not reached this point.
        missing = sorted(set(range(num_processes())) - set(_read_texts(client, key)))
        if missing:
            who = ", ".join(map(str, missing))
            message = f"process {who} did not reach the barrier '{shown or name}' within {timeout:.0f} s"
        else:
            message = f"the processes lost their connection at the barrier '{shown or name}'"
        raise UserError(f"{message}: {first_line(e)}") from e
    said = _read_texts(client, key)
    first = said[0][0]
    if other := next((process for process in range(num_processes()) if said[process][0] != first), None):
        raise UserError(
            f"process {other} is at the barrier '{said[other][0]}', and process 0 is at '{first}': start all processes "
            "with the same options and files, and the same version of mtjax"
        )
    return [said[process][1] for process in range(num_processes())]


def check_same(what: str, digest: str, shown: object) -> None:
    """Checks that all processes have read the same: each reads its own files, perhaps on another machine.

    Args:
      what: what was read, as a plural; the same in all processes.
      digest: of its content.
      shown: where this process has read it.

    Raises:
      UserError: in all processes, if the content of one differs from that of process 0.
    """
    texts = [json.loads(text) for text in all_gather_text(what, json.dumps([digest, str(shown)]))]
    if other := next((process for process, (found, _) in enumerate(texts) if found != texts[0][0]), None):
        theirs, ours = (f"{path} (digest {found[:8]})" for found, path in (texts[other], texts[0]))
        raise UserError(f"process {other} has read other {what} than process 0: {theirs}, and {ours}: {SAME_FILES}")


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


def _read_texts(client: Any, barrier: str) -> dict[int, tuple[str, str]]:
    """Returns the names and texts that processes have set for a barrier, by process."""
    texts = client.key_value_dir_get(f"{barrier}/")
    return {int(key.rpartition("/")[2]): tuple(json.loads(text)) for key, text in texts}
