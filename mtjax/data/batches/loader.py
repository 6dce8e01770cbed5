"""Batches for one process, ahead of time: grain reads them in threads or processes, and a stall or death is an error.

The loader has no state: batch k of a run is a function of the samples consumed before it, so a run
continues from that one number anywhere, on any number of processes.
"""

import contextlib
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
from absl import flags

from mtjax.config import Config
from mtjax.data.batches.batch_schedule import BatchSchedule
from mtjax.data.samples.sample import Dataset, Sample, stack
from mtjax.errors import UserError

Rows = np.ndarray | Callable[[int], np.ndarray]

THREADS = 2
BATCHES_AHEAD = 4
LONGEST_CLOSE = 10.0
GRACE = 10.0  # a stall is better reported by the reader that stalls, and workers take seconds to start


@dataclass(frozen=True)
class StepBatches:
    """This process's part of the global batch of every step, by number of the step: a random-access source for grain.

    Attributes:
      dataset: samples, numbered as the run consumes them.
      rows: this process's rows of a global batch of each size.
      start_sample: samples consumed before step 0 of the source.
      batch_schedule: global batch sizes.
      limit: samples that may be consumed.
      timeout: seconds that making one batch may take.
    """

    dataset: Dataset
    rows: Mapping[int, np.ndarray]
    start_sample: int
    batch_schedule: BatchSchedule
    limit: int
    timeout: float

    def __len__(self) -> int:
        return self.batch_schedule.steps_between(self.start_sample, self.limit)

    def __getitem__(self, index: Any) -> Sample:
        consumed = self.batch_schedule.advance(self.start_sample, int(index))
        rows = consumed + self.rows[self.batch_schedule.batch_size(consumed)]

        def read() -> Sample:
            return stack([self.dataset[int(row)] for row in rows])

        batch = within(self.timeout, read, f"reading samples {rows[0]} to {rows[-1]}")
        # Dropout's keys are made from it.
        batch["sample_index"] = rows.astype(np.uint32)
        return batch


def within(seconds: float, work: Callable[[], Sample], what: str) -> Sample:
    """Returns the result of `work`, which is abandoned when it takes too long.

    Raises:
      UserError: it takes longer than `seconds`.
    """
    results: queue.Queue[Sample | BaseException] = queue.Queue()

    def run() -> None:
        try:
            results.put(work())
        except BaseException as e:  # raised again below, in the thread that waits
            results.put(e)

    # Not a pool, whose threads Python joins at exit: one that waits for a dead disk can't be ended.
    threading.Thread(target=run, daemon=True).start()
    try:
        result = results.get(timeout=seconds)
    except queue.Empty:
        raise UserError(
            f"{what} takes longer than {seconds:g} seconds: is a disk or network gone? (--loader-timeout waits longer)"
        ) from None
    if isinstance(result, BaseException):
        raise result
    return result


class Loader(Iterator[Sample]):
    """Yields this process's batches, a stacked `Sample` per step, until the dataset has no full global batch left.

    Use as a context manager, or call `close`.
    """

    def __init__(self, source: StepBatches, num_workers: int, timeout: float) -> None:
        self._timeout = timeout
        self._workers = num_workers
        # Before workers start, so that only those of this loader are ever killed.
        self._other_children = set(multiprocessing.active_children())
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BATCHES_AHEAD)
        dataset = grain.MapDataset.source(source).to_iter_dataset(options)
        if num_workers:
            if not flags.FLAGS.is_parsed():  # grain asks absl for settings, which only absl's own main() would parse
                flags.FLAGS.mark_as_parsed()
            workers = grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=BATCHES_AHEAD)
            # Batches are small: through a pipe they are copied, while shared memory would outlive a killed run.
            by_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
            dataset = grain.experimental.WithOptionsIterDataset(dataset, by_pipe).mp_prefetch(workers)
        self._batches = dataset.__iter__()
        # One: grain prefetches already.
        self._ready: queue.Queue[Sample | Exception] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._over: Exception | None = None
        # Waiting in a separate thread, so that a batch that never comes can be given up.
        self._pump = threading.Thread(target=self._fill, name="mtjax-loader", daemon=True)
        self._pump.start()

    def __next__(self) -> Sample:
        """Returns the next batch: `[rows, sequence_length]` arrays, and `sample_index` uint32[rows].

        Raises:
          StopIteration: the data end here.
          UserError: a worker died, or no batch came within the timeout.
        """
        if self._over is None:
            try:
                item = self._ready.get(timeout=self._timeout + GRACE)
            except queue.Empty:
                self._kill_workers()
                item = UserError(
                    f"no batch came for {self._timeout + GRACE:g} seconds: the {self._workers or 'prefetching'} "
                    f"{'worker processes' if self._workers else 'threads'} that make them are stuck, or were stopped "
                    "(--loader-timeout waits longer)"
                )
            if not isinstance(item, Exception):
                return item
            self._over = item
            self.close()
        raise self._over

    def _fill(self) -> None:
        while not self._closed.is_set():
            try:
                item: Sample | Exception = next(self._batches)
            except StopIteration as e:
                item = e
            except UserError as e:
                item = e
            except Exception as e:
                item = UserError(f"the data loader failed: {type(e).__name__}: {e}")
                item.__cause__ = e
            while not self._closed.is_set():
                with contextlib.suppress(queue.Full):
                    self._ready.put(item, timeout=0.1)
                    break
            if isinstance(item, Exception):
                return

    def _kill_workers(self) -> None:
        """Kills worker processes that don't react; grain would wait for them, and the run could not end."""
        for child in set(multiprocessing.active_children()) - self._other_children:
            child.kill()

    def close(self) -> None:
        """Ends threads and worker processes; no batch comes after it."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._over = self._over or StopIteration()
        # Also in a thread: it joins grain's threads, which may wait for a dead disk.
        closing = threading.Thread(target=self._batches.close, daemon=True)
        closing.start()
        for thread in (closing, self._pump):
            thread.join(timeout=LONGEST_CLOSE)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_loader(
    config: Config, dataset: Dataset, *, rows: Rows, start_sample: int, batch_schedule: BatchSchedule
) -> Loader:
    """Batches of this process from position `start_sample` on.

    Args:
      config: says how many worker processes, and how long to wait for a batch.
      dataset: samples, numbered as the run consumes them.
      rows: this process's rows of a global batch, ascending; with a batch-size ramp a function of the batch size.
        Several processes may have the same row.
      start_sample: samples consumed so far: what a checkpoint stores.
      batch_schedule: global batch size by consumed samples.

    Returns:
      An iterator of the datasets' arrays, `[rows, ...]`, and `sample_index` uint32[rows], each sample's number in the
      order of the run. It ends when the dataset has no full global batch left.
    """
    # As a table: worker processes get no function, which may hold a mesh with its devices.
    by_size = {size: rows(size) if callable(rows) else rows for size in batch_schedule.batch_sizes()}
    source = StepBatches(dataset, by_size, start_sample, batch_schedule, len(dataset), config.data.loader_timeout)
    return Loader(source, config.data.num_workers, config.data.loader_timeout)
