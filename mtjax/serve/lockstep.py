"""Several processes with one replica: the first of them tells the others what to do before each step.

Each process runs an `Engine` of its own over the mesh that they share. Engines that are asked for the same requests in
the same order, and cancel the same ones before the same steps, run the same programs. So the first process leaves a
plan for every step at jax's coordination service: requests that join, and those that end. What ends a text by its words
is known there alone; there it ends at once, and everywhere with the next plan.
"""

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

from mtjax.generate.engine import Engine
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.serve.kv_mailbox import receive
from mtjax.train.processes.coordination import service

RETAINED_PLANS = 64
"""Plans that stay: none is behind by more steps, since steps are collective."""


def plan_prefix(replica: int) -> str:
    """Where a replica's plans are left."""
    return f"mtjax/serve/{replica}/plan"


class LockstepLeader:
    """The engine of a replica's first process, as `Host` uses one; a search for beams it does not do.

    Args:
      engine: nobody else calls it.
      replica: the number of the one that the processes share.
    """

    def __init__(self, engine: Engine, replica: int) -> None:
        self._prefix = plan_prefix(replica)
        self._engine, self.max_context, self.is_encoder_decoder = engine, engine.max_context, engine.is_encoder_decoder
        self._changed = threading.Condition()
        self._joining: list[Request] = []
        self._ending: list[Request] = []
        self._numbers: dict[Request, int] = {}
        self._engine_requests: dict[Request, Request] = {}
        """Of a request, the one that the engine has."""
        self._count = self._plans = 0

    @property
    def load(self) -> tuple[int, int]:
        """Requests that wait, and that run."""
        waiting, running = self._engine.load
        return waiting + len(self._joining), running

    def submit(self, request: Request) -> None:
        """Puts a request into the next plan.

        Raises:
          UserError: it can't be continued.
        """
        self._engine.check(request)
        with self._changed:
            self._joining.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Ends a request with the next plan."""
        with self._changed:
            self._ending.append(request)
            self._changed.notify()

    def wake(self) -> None:
        """Lets `run` look at `stopped`."""
        with self._changed:
            self._changed.notify_all()

    def run(self, stopped: threading.Event | None = None) -> None:
        """Works until nothing is left to do; with `stopped`, until that is set, and then lets the others go."""
        busy = True
        while True:
            with self._changed:
                while not (busy or self._joining or self._ending):
                    if stopped is None:
                        return None
                    if stopped.is_set():
                        return self._publish({"stop": True})
                    self._changed.wait()
                joining, self._joining = self._joining, []
                ending, self._ending = self._ending, []
            busy = self._step(joining, ending)

    def _step(self, joining: list[Request], ending: list[Request]) -> bool:
        for request in joining:
            self._numbers[request], self._count = self._count, self._count + 1
            self._engine_requests[request] = ending_once(request, self._forget, self.cancel)
        ends = [request for request in ending if request in self._numbers]
        plan = {
            "join": [[self._numbers[request], request_to_json(request)] for request in joining],
            "end": [self._numbers[request] for request in ends],
        }
        self._publish(plan)
        for request in joining:
            self._engine.submit(self._engine_requests[request])
        for request in ends:
            self._engine.cancel(self._engine_requests[request])
        return self._engine.step()

    def _forget(self, request: Request) -> None:
        del self._numbers[request], self._engine_requests[request]

    def _publish(self, plan: dict[str, Any]) -> None:
        service().key_value_set(f"{self._prefix}/{self._plans}", json.dumps(plan))
        if self._plans >= RETAINED_PLANS:
            service().key_value_delete(f"{self._prefix}/{self._plans - RETAINED_PLANS}")
        self._plans += 1


def ending_once(request: Request, forget: Callable[[Request], None], end: Callable[[Request], None]) -> Request:
    """A request that others end later than its listener does, and of which nothing is told in between.

    Args:
      request: whose listener may end it.
      forget: called when the others have ended it.
      end: asks them to.
    """
    told = False

    def on_end(why: FinishReason) -> None:
        nonlocal told
        forget(request)
        if not told:
            told = True
            request.on_end(why)

    def on_token(token: Token) -> bool:
        nonlocal told
        if not told and request.on_token(token):
            told = True
            request.on_end("stop")
            end(request)
        return False

    return dataclasses.replace(request, on_token=on_token, on_end=on_end)


def follow(engine: Engine, replica: int) -> None:
    """Does what the first process of a replica says, until that stops."""
    requests: dict[int, Request] = {}
    for plan in receive(plan_prefix(replica)):
        if "stop" in plan:
            return
        for number, words in plan["join"]:
            requests[number] = request = request_from_json(
                words, on_end=lambda why, number=number: requests.pop(number)
            )
            engine.submit(request)
        for number in plan["end"]:
            if number in requests:
                engine.cancel(requests[number])
        engine.step()


def request_to_json(request: Request) -> dict[str, Any]:
    """What other processes need of a request."""
    return {
        "prompt": request.prompt,
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": sorted(request.stop_ids),
        "logprobs": request.logprobs,
        "echo": request.echo,
    }


def request_from_json(words: dict[str, Any], **listeners: Any) -> Request:
    """The request that `as_words` wrote, with these listeners."""
    sampling, stop_ids = Sampling(**words["sampling"]), frozenset(words["stop_ids"])
    prompt, told = tuple(words["prompt"]), {"logprobs": words["logprobs"], "echo": words["echo"]}
    return Request(prompt, sampling, stop_ids, **told, **listeners)
