"""Several processes with one engine: process 0 tells the others what to do before each step.

Each process runs an `Engine` of its own over the mesh that they share. Engines that are asked for the same requests in
the same order, and cancel the same ones before the same steps, run the same programs. So process 0, which speaks with
clients, leaves a plan for every step at jax's coordination service: requests that join, and those that end. What ends a
text by its words is known in process 0 alone; there it ends at once, and everywhere with the next plan.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import jax

from mtjax.generate.engine import Engine
from mtjax.generate.request import ENDED, Request, Sampling, Token
from mtjax.train.processes.exchange import service

PLANS = "mtjax/serve/plan"
KEPT = 64
"""Plans that stay: none is behind by more steps, since steps are collective."""
PATIENCE_MS = 5000
"""Of one look for a plan; then comes another."""


class Leader:
    """The engine of process 0, as `Host` uses one; what is not a request, like a search for beams, it does not do."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.max_context, self.reads_text = engine, engine.max_context, engine.reads_text
        self._changed = threading.Condition()
        self._joining: list[Request] = []
        self._ending: list[Request] = []
        self._numbers: dict[Request, int] = {}
        self._followed: dict[Request, Request] = {}
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
                        return self._tell({"stop": True})
                    self._changed.wait()
                joining, self._joining = self._joining, []
                ending, self._ending = self._ending, []
            busy = self._step(joining, ending)

    def _step(self, joining: list[Request], ending: list[Request]) -> bool:
        for request in joining:
            self._numbers[request], self._count = self._count, self._count + 1
            self._followed[request] = self._as_followed(request)
        ends = [request for request in ending if request in self._numbers]
        plan = {
            "join": [[self._numbers[request], as_words(request)] for request in joining],
            "end": [self._numbers[request] for request in ends],
        }
        self._tell(plan)
        for request in joining:
            self._engine.submit(self._followed[request])
        for request in ends:
            self._engine.cancel(self._followed[request])
        return self._engine.step()

    def _as_followed(self, request: Request) -> Request:
        """A request that ends with a plan where its listener would end it, and tells no more."""
        told = False

        def on_end(why: ENDED) -> None:
            nonlocal told
            del self._numbers[request], self._followed[request]
            if not told:
                request.on_end(why)

        def on_token(token: Token) -> bool:
            nonlocal told
            if not told and request.on_token(token):
                told = True
                request.on_end("stop")
                self.cancel(request)
            return False

        return dataclasses.replace(request, on_token=on_token, on_end=on_end)

    def _tell(self, plan: dict[str, Any]) -> None:
        service().key_value_set(f"{PLANS}/{self._plans}", json.dumps(plan))
        if self._plans >= KEPT:
            service().key_value_delete(f"{PLANS}/{self._plans - KEPT}")
        self._plans += 1


def follow(engine: Engine) -> None:
    """Does what process 0 says, until that stops."""
    requests: dict[int, Request] = {}
    for plan in _plans():
        if "stop" in plan:
            return
        for number, words in plan["join"]:
            requests[number] = request = from_words(words, lambda why, number=number: requests.pop(number))
            engine.submit(request)
        for number in plan["end"]:
            if number in requests:
                engine.cancel(requests[number])
        engine.step()


def _plans() -> Iterator[dict[str, Any]]:
    count = 0
    while True:
        try:
            words = service().blocking_key_value_get(f"{PLANS}/{count}", PATIENCE_MS)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise
            continue
        yield json.loads(words)
        count += 1


def as_words(request: Request) -> dict[str, Any]:
    """What the other processes need of a request."""
    return {
        "prompt": request.prompt,
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": sorted(request.stop_ids),
        "logprobs": request.logprobs,
        "echo": request.echo,
    }


def from_words(words: dict[str, Any], on_end: Any) -> Request:
    """The request that `as_words` wrote."""
    sampling, stop_ids = Sampling(**words["sampling"]), frozenset(words["stop_ids"])
    prompt, told = tuple(words["prompt"]), {"logprobs": words["logprobs"], "echo": words["echo"]}
    return Request(prompt, sampling, stop_ids, **told, on_end=on_end)
