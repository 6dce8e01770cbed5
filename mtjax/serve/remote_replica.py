"""Replicas on the devices of other processes: process 0 sends commands, and receives events with tokens.

The first process of such a replica runs its engine, a `LockstepLeader` if the replica spans multiple processes, and
schedules its requests. It exchanges messages with process 0 through `mtjax.serve.kv_mailbox`: requests and
cancellations in one direction, and in the other the tokens of each decode step in one message.
"""

import threading
from collections.abc import Iterator
from typing import Any

from mtjax.generate.engine import Engine
from mtjax.generate.request import FinishReason, Request, Token
from mtjax.serve.kv_mailbox import Sender, receive
from mtjax.serve.lockstep import LockstepLeader, ending_once, request_from_json, request_to_json

JOIN, END, STOP, PROMPT, TOKEN = "join", "end", "stop", "prompt", "token"


def commands_prefix(replica: int) -> str:
    """Returns the key prefix of process 0's commands to a replica."""
    return f"mtjax/serve/{replica}/commands"


def events_prefix(replica: int) -> str:
    """Returns the key prefix of a replica's events."""
    return f"mtjax/serve/{replica}/events"


class RemoteReplica:
    """A replica without devices of process 0, with the interface of an engine that `Host` uses.

    Args:
      replica: index of the replica.
      local_engine: an engine of the same model in this process, which validates requests.
      sequences: number of slots of the replica.
    """

    def __init__(self, replica: int, local_engine: Engine, sequences: int) -> None:
        self._local_engine, self.max_context, self.is_encoder_decoder = (
            local_engine,
            local_engine.max_context,
            local_engine.is_encoder_decoder,
        )
        self._sequences, self._count, self._lock = sequences, 0, threading.Lock()
        self._commands = Sender(commands_prefix(replica))
        self._events: Iterator[list[Any]] = receive(events_prefix(replica), only_reader=True)
        self._numbers: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        """By number, the wrapped requests whose listeners receive the events."""

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of waiting and of running requests (estimated: slots are filled first)."""
        # Process 0 does not ask the replica: it counts what it has sent and not got back.
        count = len(self._requests)
        running = min(count, self._sequences)
        return count - running, running

    def submit(self, request: Request) -> None:
        """Sends a request to the replica.

        Raises:
          UserError: the request is invalid.
        """
        # Validated here, so that the caller gets the error; the replica has the same model.
        self._local_engine.check(request)
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._numbers[request], self._requests[number] = number, ending_once(request, self._forget, self.cancel)
        self._commands.send([JOIN, number, request_to_json(request)])

    def cancel(self, request: Request) -> None:
        """Cancels a request; does nothing if it has ended or belongs to another replica."""
        # `Host` cancels a request in all engines, as it does not note which one has it.
        number = self._numbers.get(request)
        if number is not None:
            self._commands.send([END, number])

    def wake(self) -> None:
        """Makes the replica stop, and `run` return, once no work is left."""
        self._commands.send([STOP])

    def run(self, stopped: threading.Event | None = None) -> None:
        """Passes events to listeners until no request is left; with `stopped`, until the replica has stopped."""
        if stopped is None and not self._requests:
            return
        for message in self._events:
            for kind, *arguments in message:
                if kind == STOP:
                    return
                self._handle(kind, *arguments)
            if stopped is None and not self._requests:
                return

    def _handle(self, kind: str, number: int, value: Any) -> None:
        """Passes an event to its request's listener."""
        request = self._requests[number]
        if kind == TOKEN:
            request.on_token(_token_from_json(value))
        elif kind == PROMPT:
            request.on_prompt([_token_from_json(each) for each in value])
        else:
            request.on_end(value)

    def _forget(self, request: Request) -> None:
        with self._lock:
            del self._requests[self._numbers.pop(request)]


def serve_replica(engine: Engine | LockstepLeader, replica: int) -> None:
    """Executes process 0's commands as the first process of a replica, until process 0 stops."""
    events, stopped = Sender(events_prefix(replica)), threading.Event()
    requests: dict[int, Request] = {}
    failures: list[BaseException] = []

    def read_commands() -> None:
        try:
            for message in receive(commands_prefix(replica), only_reader=True):
                for kind, *arguments in message:
                    if kind == STOP:
                        return
                    if kind == JOIN:
                        _join(engine, requests, events, *arguments)
                    elif (request := requests.get(arguments[0])) is not None:
                        engine.cancel(request)
        except BaseException as e:  # the coordination service is lost: re-raised in the engine's thread below
            failures.append(e)
        finally:
            stopped.set()
            engine.wake()

    threading.Thread(target=read_commands, name=f"commands of replica {replica}", daemon=True).start()
    # Ends only when no work is left: all requests have sent their END before STOP.
    engine.run(stopped)
    if failures:
        raise failures[0]
    events.send([STOP])
    events.close()


def _join(
    engine: Engine | LockstepLeader, requests: dict[int, Request], events: Sender, number: int, fields: dict[str, Any]
) -> None:
    """Submits a request whose listeners send events to process 0."""

    def on_token(token: Token) -> bool:
        events.send([TOKEN, number, _token_to_json(token)])
        # Stop sequences are found by process 0, which detokenizes, and arrive as END.
        return False

    def on_end(reason: FinishReason) -> None:
        del requests[number]
        events.send([END, number, reason])

    def on_prompt(tokens: list[Token]) -> None:
        events.send([PROMPT, number, [_token_to_json(token) for token in tokens]])

    requests[number] = request_from_json(fields, on_token=on_token, on_end=on_end, on_prompt=on_prompt)
    engine.submit(requests[number])


def _token_to_json(token: Token) -> list[Any]:
    return [token.id, token.logprob, list(token.top_logprobs.items())]


def _token_from_json(value: list[Any]) -> Token:
    token_id, logprob, top_logprobs = value
    return Token(token_id, logprob, dict(top_logprobs))
