"""What the server counts, as Prometheus reads it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW = 10.0
"""Seconds over which tokens per second are taken."""
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One server's numbers.

    Args:
      loads: of each replica, requests to its engine that wait, and that run.
      sequences: that can run at a time in each.
    """

    def __init__(self, loads: Sequence[Callable[[], tuple[int, int]]], sequences: int) -> None:
        self._registry = registry = CollectorRegistry()
        gauge = Gauge("mtjax_texts_waiting", "Texts that wait for a slot", registry=registry)
        gauge.set_function(lambda: sum(load()[0] for load in loads))
        gauge = Gauge("mtjax_slots_in_use", "Sequences that are being read or written", registry=registry)
        gauge.set_function(lambda: sum(load()[1] for load in loads))
        gauge = Gauge("mtjax_slots", "Sequences that can be written at a time", registry=registry)
        gauge.set(sequences * len(loads))
        waiting = Gauge("mtjax_replica_texts_waiting", "Of each replica", ["replica"], registry=registry)
        running = Gauge("mtjax_replica_slots_in_use", "Of each replica", ["replica"], registry=registry)
        for number, load in enumerate(loads):
            waiting.labels(number).set_function(lambda load=load: load()[0])
            running.labels(number).set_function(lambda load=load: load()[1])
        written = Counter("mtjax_replica_generated_tokens", "Of each replica", ["replica"], registry=registry)
        self._of_replica = [written.labels(number) for number in range(len(loads))]
        self._rate = Rate()
        gauge = Gauge("mtjax_tokens_per_second", f"Tokens written in the last {WINDOW:g} s", registry=registry)
        gauge.set_function(self._rate.per_second)
        self.requests = Counter("mtjax_requests", "Answers", ["path", "code"], registry=registry)
        self.prompt_tokens = Counter("mtjax_prompt_tokens", "Tokens of prompts", registry=registry)
        self._tokens = Counter("mtjax_generated_tokens", "Tokens written", registry=registry)
        self.finished = Counter("mtjax_texts", "Texts that ended, by why", ["ended"], registry=registry)
        self.time_to_first_token = Histogram(
            "mtjax_time_to_first_token_seconds",
            "From a request to its first token",
            registry=registry,
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self.time_per_token = Histogram(
            "mtjax_time_per_token_seconds",
            "From a token to the next of its text",
            registry=registry,
            buckets=PER_TOKEN_BUCKETS,
        )
        self.request_seconds = Histogram(
            "mtjax_text_seconds", "From a request to the end of a text", registry=registry, buckets=REQUEST_BUCKETS
        )

    def count_token(self, replica: int) -> None:
        """One more token was written, by this replica."""
        self._tokens.inc()
        self._of_replica[replica].inc()
        self._rate.count()

    def page(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class Rate:
    """Events per second, lately: counted and read in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, int]] = deque()

    def count(self) -> None:
        """One more."""
        now = int(time.monotonic())
        with self._lock:
            if self._seconds and self._seconds[-1][0] == now:
                self._seconds[-1] = now, self._seconds[-1][1] + 1
            else:
                self._seconds.append((now, 1))
                self._forget(now)

    def per_second(self) -> float:
        """Over the last `WINDOW`."""
        with self._lock:
            self._forget(int(time.monotonic()))
            return sum(count for _, count in self._seconds) / WINDOW

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW:
            self._seconds.popleft()
