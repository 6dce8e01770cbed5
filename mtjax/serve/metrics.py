"""The server's Prometheus metrics."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW = 10.0
"""Seconds over which tokens per second are averaged."""
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The metrics of one server.

    Args:
      loads: for each replica, a function that returns its numbers of waiting and of running requests.
      sequences: number of slots of each replica.
    """

    def __init__(self, loads: Sequence[Callable[[], tuple[int, int]]], sequences: int) -> None:
        # Not the global registry: tests run several servers in a process.
        self._registry = registry = CollectorRegistry()
        gauge = Gauge("mtjax_texts_waiting", "Texts that wait in the queue for a slot", registry=registry)
        gauge.set_function(lambda: sum(load()[0] for load in loads))
        gauge = Gauge("mtjax_slots_in_use", "Slots with a sequence in prefill or decode", registry=registry)
        gauge.set_function(lambda: sum(load()[1] for load in loads))
        gauge = Gauge("mtjax_slots", "Slots: sequences that can be generated at a time", registry=registry)
        gauge.set(sequences * len(loads))
        waiting = Gauge("mtjax_replica_texts_waiting", "Waiting texts by replica", ["replica"], registry=registry)
        running = Gauge("mtjax_replica_slots_in_use", "Slots in use by replica", ["replica"], registry=registry)
        for number, load in enumerate(loads):
            waiting.labels(number).set_function(lambda load=load: load()[0])
            running.labels(number).set_function(lambda load=load: load()[1])
        generated = Counter(
            "mtjax_replica_generated_tokens", "Generated tokens by replica", ["replica"], registry=registry
        )
        self._of_replica = [generated.labels(number) for number in range(len(loads))]
        self._rate = Rate()
        gauge = Gauge(
            "mtjax_tokens_per_second", f"Generated tokens per second over the last {WINDOW:g} s", registry=registry
        )
        gauge.set_function(self._rate.per_second)
        self.requests = Counter(
            "mtjax_requests", "HTTP responses by path and status", ["path", "code"], registry=registry
        )
        self.prompt_tokens = Counter("mtjax_prompt_tokens", "Prompt tokens", registry=registry)
        self._tokens = Counter("mtjax_generated_tokens", "Generated tokens", registry=registry)
        self.finished = Counter("mtjax_texts", "Finished texts by finish reason", ["ended"], registry=registry)
        self.time_to_first_token = Histogram(
            "mtjax_time_to_first_token_seconds",
            "From a request to its first token",
            registry=registry,
            buckets=FIRST_TOKEN_BUCKETS,
        )
        self.time_per_token = Histogram(
            "mtjax_time_per_token_seconds",
            "From one token of a text to the next",
            registry=registry,
            buckets=PER_TOKEN_BUCKETS,
        )
        self.request_seconds = Histogram(
            "mtjax_text_seconds", "From a request to the end of a text", registry=registry, buckets=REQUEST_BUCKETS
        )

    def count_token(self, replica: int) -> None:
        """Counts a token that a replica has generated."""
        self._tokens.inc()
        self._of_replica[replica].inc()
        self._rate.count()

    def page(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class Rate:
    """Events per second over the last `WINDOW` seconds; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[tuple[int, int]] = deque()

    def count(self) -> None:
        """Counts an event."""
        now = int(time.monotonic())
        with self._lock:
            # One entry for each second, not for each token.
            if self._seconds and self._seconds[-1][0] == now:
                self._seconds[-1] = now, self._seconds[-1][1] + 1
            else:
                self._seconds.append((now, 1))
                self._forget(now)

    def per_second(self) -> float:
        """Returns the rate."""
        with self._lock:
            self._forget(int(time.monotonic()))
            return sum(count for _, count in self._seconds) / WINDOW

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW:
            self._seconds.popleft()
