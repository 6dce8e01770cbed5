"""Replicas that span multiple processes: the first process (the leader) broadcasts a plan before each step.

Each process runs an `Engine` over the shared mesh. Engines that get the same requests in the same order, and cancel the
same ones before the same steps, run the same programs. So the leader publishes a plan for every step in JAX's
coordination service: the requests that join, and those that are cancelled. Only the leader detokenizes, and so detects
stop sequences; there a text ends at once, and in all engines with the next plan.
"""

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

from mtjax.generate.engine import Engine
from mtjax.generate.request import FinishReason, Request, Sampling, Token
from mtjax.runtime.processes.coordination import service
from mtjax.serve.kv_mailbox import receive

RETAINED_PLANS = 64
"""Number of plans that are retained: as steps are collective, no process is further behind."""


def plan_prefix(replica: int) -> str:
    """Returns the key prefix of a replica's plans."""
    return f"mtjax/serve/{replica}/plan"


class LockstepLeader:
    """The leader's engine, with the interface that `Host` uses; without beam search.

    Args:
      engine: the engine; nothing else may call it.
      replica: index of the replica.
    """

    def __init__(self, engine: Engine, replica: int) -> None:
        self._prefix = plan_prefix(replica)
        self._engine, self.max_context, self.is_encoder_decoder = engine, engine.max_context, engine.is_encoder_decoder
        self._changed = threading.Condition()
        self._joining: list[Request] = []
        self._ending: list[Request] = []
        self._numbers: dict[Request, int] = {}
        self._engine_requests: dict[Request, Request] = {}
        """By request, its wrapped copy that the engine has."""
        self._count = self._plans = 0

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of waiting and of running requests."""
        waiting, running = self._engine.load
        return waiting + len(self._joining), running

    def submit(self, request: Request) -> None:
        """Adds a request to the next plan.

        Raises:
          UserError: the request is invalid.
        """
        self._engine.check(request)
        with self._changed:
            self._joining.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Cancels a request with the next plan."""
        with self._changed:
            self._ending.append(request)
            self._changed.notify()

    def wake(self) -> None:
        """Wakes `run` so that it checks `stopped`."""
        with self._changed:
            self._changed.notify_all()

    def run(self, stopped: threading.Event | None = None) -> None:
        """Steps until no work is left; with `stopped`, until it is set, and then stops the other processes."""
        # The first step may find work that was submitted before `run`.
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
        """Publishes a plan and steps; returns whether there was any work."""
        for request in joining:
            # Requests are compared by identity, which other processes don't have.
            self._numbers[request], self._count = self._count, self._count + 1
            self._engine_requests[request] = ending_once(request, self._forget, self.cancel)
        # Requests may have ended in the engines since they were cancelled.
        ends = [request for request in ending if request in self._numbers]
        plan = {
            "join": [[self._numbers[request], request_to_json(request)] for request in joining],
            "end": [self._numbers[request] for request in ends],
        }
        # Before this process steps: followers must join the step's collectives, or it would never return.
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
        # Plans are deleted by age: followers report nothing to the leader.
        if self._plans >= RETAINED_PLANS:
            service().key_value_delete(f"{self._prefix}/{self._plans - RETAINED_PLANS}")
        self._plans += 1


def ending_once(request: Request, forget: Callable[[Request], None], end: Callable[[Request], None]) -> Request:
    """Wraps a request whose listener ends it before the engines do; the tokens in between are dropped.

    Args:
      request: the request, whose `on_token` may end it.
      forget: called when the engines have ended it.
      end: makes the engines end it.
    """
    has_ended = False

    def on_end(reason: FinishReason) -> None:
        nonlocal has_ended
        forget(request)
        if not has_ended:
            has_ended = True
            request.on_end(reason)

    def on_token(token: Token) -> bool:
        nonlocal has_ended
        if not has_ended and request.on_token(token):
            has_ended = True
            request.on_end("stop")
            end(request)
        # Never true: the leader's engine would end the text a step before the followers' engines, and their collectives
        # would no longer match.
        return False

    return dataclasses.replace(request, on_token=on_token, on_end=on_end)


def follow(engine: Engine, replica: int) -> None:
    """Executes the plans of a replica's leader until it stops."""
    requests: dict[int, Request] = {}
    for plan in receive(plan_prefix(replica)):
        if "stop" in plan:
            return
        for number, fields in plan["join"]:
            on_end = lambda reason, number=number: requests.pop(number)  # noqa: E731
            requests[number] = request = request_from_json(fields, on_end=on_end)
            # In the order of the plan: engines give slots in the order of their queues.
            engine.submit(request)
        for number in plan["end"]:
            # The request may have ended by its length since the leader planned to cancel it.
            if number in requests:
                engine.cancel(requests[number])
        engine.step()


def request_to_json(request: Request) -> dict[str, Any]:
    """Serializes a request, without its listeners."""
    return {
        "prompt": request.prompt,
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": sorted(request.stop_ids),
        "logprobs": request.logprobs,
        "echo": request.echo,
    }


def request_from_json(fields: dict[str, Any], **listeners: Any) -> Request:
    """Deserializes a request of `request_to_json`, with these listeners."""
    sampling, stop_ids = Sampling(**fields["sampling"]), frozenset(fields["stop_ids"])
    return Request(tuple(fields["prompt"]), sampling, stop_ids, fields["logprobs"], fields["echo"], **listeners)
