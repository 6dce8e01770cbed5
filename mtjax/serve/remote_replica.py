"""Replicas on the devices of other processes: process 0 asks for texts, and hears of their tokens.

The first process of such a replica runs its engine - a `Leader` where it shares the replica with others - and decides
what is done when. The two exchange messages through `mtjax.serve.kv_mailbox`: requests and the numbers of
those to cancel, and in the other direction the tokens of each decode step in one message.
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
    """Where process 0 says what a replica shall do."""
    return f"mtjax/serve/{replica}/orders"


def events_prefix(replica: int) -> str:
    """Where the replica says what it wrote."""
    return f"mtjax/serve/{replica}/news"


class RemoteReplica:
    """A replica that has none of process 0's devices, as `Host` uses an engine.

    Args:
      replica: its number.
      like: an engine of the same model, which knows what can be continued.
      sequences: that it writes at a time.
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
        """By number, requests that tell what is heard of them."""

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        count = len(self._requests)
        running = min(count, self._sequences)
        return count - running, running

    def submit(self, request: Request) -> None:
        """Sends a request.

        Raises:
          UserError: it can't be continued.
        """
        self._local_engine.check(request)
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._numbers[request], self._requests[number] = number, ending_once(request, self._forget, self.cancel)
        self._commands.send([JOIN, number, request_to_json(request)])

    def cancel(self, request: Request) -> None:
        """Ends a request soon; does nothing to one that has ended, or is another replica's."""
        number = self._numbers.get(request)
        if number is not None:
            self._commands.send([END, number])

    def wake(self) -> None:
        """Ends `run`, once nothing is left to do."""
        self._commands.send([STOP])

    def run(self, stopped: threading.Event | None = None) -> None:
        """Tells what the replica writes, until nothing is left to do; with `stopped`, until it has stopped."""
        if stopped is None and not self._requests:
            return
        for letter in self._events:
            for kind, *words in letter:
                if kind == STOP:
                    return
                self._handle(kind, *words)
            if stopped is None and not self._requests:
                return

    def _handle(self, kind: str, number: int, words: Any) -> None:
        request = self._requests[number]
        if kind == TOKEN:
            request.on_token(_token_from_json(words))
        elif kind == PROMPT:
            request.on_prompt([_token_from_json(each) for each in words])
        else:
            request.on_end(words)

    def _forget(self, request: Request) -> None:
        with self._lock:
            del self._requests[self._numbers.pop(request)]


def serve_replica(engine: Engine | LockstepLeader, replica: int) -> None:
    """Works for process 0 as the first process of a replica, until that stops."""
    events, stopped = Sender(events_prefix(replica)), threading.Event()
    requests: dict[int, Request] = {}
    failures: list[BaseException] = []

    def read_commands() -> None:
        try:
            for letter in receive(commands_prefix(replica), only_reader=True):
                for kind, *words in letter:
                    if kind == STOP:
                        return
                    if kind == JOIN:
                        _join(engine, requests, events, *words)
                    elif (request := requests.get(words[0])) is not None:
                        engine.cancel(request)
        except BaseException as e:  # the service is gone: this process can't go on
            failures.append(e)
        finally:
            stopped.set()
            engine.wake()

    threading.Thread(target=read_commands, name=f"orders of replica {replica}", daemon=True).start()
    engine.run(stopped)
    if failures:
        raise failures[0]
    events.send([STOP])
    events.close()


def _join(
    engine: Engine | LockstepLeader, requests: dict[int, Request], events: Sender, number: int, words: dict[str, Any]
) -> None:
    def on_token(token: Token) -> bool:
        events.send([TOKEN, number, _token_to_json(token)])
        return False

    def on_end(why: FinishReason) -> None:
        del requests[number]
        events.send([END, number, why])

    def on_prompt(tokens: list[Token]) -> None:
        events.send([PROMPT, number, [_token_to_json(token) for token in tokens]])

    requests[number] = request_from_json(words, on_token=on_token, on_end=on_end, on_prompt=on_prompt)
    engine.submit(requests[number])


def _token_to_json(token: Token) -> list[Any]:
    return [token.id, token.logprob, list(token.top_logprobs.items())]


def _token_from_json(words: list[Any]) -> Token:
    number, logprob, likely = words
    return Token(number, logprob, dict(likely))
