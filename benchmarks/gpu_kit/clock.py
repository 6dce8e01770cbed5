"""Seconds of what a GPU does: rounds of calls that are waited for together, the median over rounds."""

import math
import statistics
import time
from collections.abc import Callable

ROUND = 1.2
"""Seconds that a round should take."""


def seconds_of(do: Callable[[], object], wait: Callable[[], object], rounds: int = 3) -> dict[str, float]:
    """Seconds of one call: median, fastest and slowest of the rounds, after two calls that compile and warm up.

    Args:
      do: starts the work; may return before it is done.
      wait: returns when all of it is done.
      rounds: how many.
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
