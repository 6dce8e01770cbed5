"""Timing of GPU work: rounds of calls that are waited for together, and the median over rounds."""

import math
import statistics
import time
from collections.abc import Callable

ROUND = 1.2
"""Target duration of a round in seconds."""


def seconds_of(do: Callable[[], object], wait: Callable[[], object], rounds: int = 3) -> dict[str, float]:
    """Times a call; returns the median, fastest and slowest round in seconds per call, after two warm-up calls.

    Args:
      do: starts the work; may return before it is done.
      wait: blocks until all work is done.
      rounds: number of rounds.
    """
    do()
    wait()
    start = time.perf_counter()
    do()
    wait()
    calls = max(2, math.ceil(ROUND / max(time.perf_counter() - start, 1e-6)))
    each = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(min(calls, 2000)):
            do()
        wait()
        each.append((time.perf_counter() - start) / min(calls, 2000))
    return {"seconds": statistics.median(each), "fastest": min(each), "slowest": max(each)}
