"""A function over chunks of text on all cores, in order and in bounded memory."""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, TypeVar

from mtjax.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

IN_FLIGHT_PER_WORKER = 3


def map_in_order(
    function: Callable[[Item], Result], source: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yields every item with its result, in the order of `source`; only a few are in memory at any time.

    Args:
      function: is sent to each worker once; must be picklable, as must items and results.
      source: read as far ahead as the workers need.
      workers: processes; 0 calls the function here.

    Raises:
      UserError: a worker died.
    """
    if workers == 0:
        for item in source:
            yield item, function(item)
        return
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    # spawn: a fork copies the locks of this process's threads, of tokenizers and of jax, in whatever state they are.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _Worker.start, (function,))
    try:
        for item in source:
            waiting.append((item, pool.submit(_Worker.call, item)))
            # The first result is awaited before more is read: memory does not grow where one chunk takes long.
            if len(waiting) > workers * IN_FLIGHT_PER_WORKER:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as e:
        raise UserError("a worker process was killed, perhaps for lack of memory; try fewer --workers") from e
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """What a worker process keeps between items."""

    function: Callable[[Any], Any]

    @classmethod
    def start(cls, function: Callable[[Any], Any]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
        cls.function = staticmethod(function)

    @classmethod
    def call(cls, item: Any) -> Any:
        return cls.function(item)
