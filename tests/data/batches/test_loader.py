import threading
import time

import numpy as np
import psutil
import pytest

from mtjax.config import Config, Data, Training
from mtjax.data.batches.batch_schedule import batch_schedule, constant
from mtjax.data.batches.loader import open_loader
from mtjax.errors import UserError


class Numbers:
    """Sample i holds the number i; some samples can go wrong."""

    def __init__(self, length, fails_at=None, hangs_at=None):
        self.length, self.fails_at, self.hangs_at = length, fails_at, hangs_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        if index == self.fails_at:
            raise UserError(f"x.bin holds garbage at sample {index}")
        if index == self.hangs_at:
            time.sleep(600)
        return {"tokens": np.full(3, index, np.int32)}


def settings(workers=0, timeout=60.0):
    return Config(data=Data(num_workers=workers, loader_timeout=timeout))


def workers_since(before):
    """Processes of this one that are alive and were not in `before`."""
    alive = [p for p in psutil.Process().children() if p not in before and p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in alive if "resource_tracker" not in str(p.cmdline())]


def load(dataset, rows, start, schedule, workers=0):
    with open_loader(settings(workers), dataset, rows=rows, start_sample=start, batch_schedule=schedule) as loader:
        return list(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_each_global_batch_in_order(workers):
    batches = load(Numbers(43), np.array([1, 2, 7]), 8, constant(8), workers)
    assert [b["tokens"][:, 0].tolist() for b in batches] == [[9, 10, 15], [17, 18, 23], [25, 26, 31], [33, 34, 39]]
    assert [b["sample_index"].tolist() for b in batches] == [b["tokens"][:, 0].tolist() for b in batches]
    assert batches[0]["sample_index"].dtype == np.uint32
    assert batches[0]["tokens"].shape == (3, 3)


def test_a_ramp_changes_the_rows():
    training = Training(global_batch_size=8, rampup_batch_size=(2, 2, 24))
    schedule = batch_schedule(training)
    batches = load(Numbers(60), lambda size: np.arange(size // 2, size), 0, schedule)
    consumed = 0
    for batch in batches:
        size = schedule.batch_size(consumed)
        assert batch["tokens"][:, 0].tolist() == list(range(consumed + size // 2, consumed + size))
        consumed += size
    assert len(batches[0]["tokens"]) == 1 and len(batches[-1]["tokens"]) == 4
    assert consumed <= 60 < consumed + 8


def test_worker_processes_need_no_function():
    unpicklable = threading.Lock()
    rows = lambda size: np.arange(size) if unpicklable else None  # noqa: E731
    assert len(load(Numbers(20), rows, 0, constant(8), workers=1)) == 2


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_resumed_run_on_any_number_of_processes_sees_the_next_sample(processes):
    training = Training(global_batch_size=8, rampup_batch_size=(4, 4, 20))
    schedule = batch_schedule(training)
    whole = [b["tokens"][:, 0].tolist() for b in load(Numbers(100), lambda n: np.arange(n), 0, schedule)]
    consumed = schedule.advance(0, 5)

    def rows_of(process):
        return lambda n: np.arange(process * n // processes, (process + 1) * n // processes)

    parts = [load(Numbers(100), rows_of(p), consumed, schedule) for p in range(processes)]
    resumed = [
        sorted(t for part in parts for t in part[step]["tokens"][:, 0].tolist()) for step in range(len(parts[0]))
    ]
    assert resumed == whole[5:]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_the_data_names_its_cause(workers):
    with (
        open_loader(
            settings(workers), Numbers(64, fails_at=20), rows=np.arange(8), start_sample=0, batch_schedule=constant(8)
        ) as loader,
        pytest.raises(UserError, match=r"x\.bin holds garbage at sample 20"),
    ):
        list(loader)


def test_an_unexpected_error_is_not_swallowed():
    class Broken(Numbers):
        def __getitem__(self, index):
            raise RuntimeError("the disk is gone")

    with pytest.raises(UserError, match="the data loader failed: RuntimeError: the disk is gone"):
        load(Broken(64), np.arange(8), 0, constant(8))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stalled_loader_is_an_error_in_time(workers):
    config = settings(workers, timeout=1.0)
    loader = open_loader(
        config, Numbers(64, hangs_at=20), rows=np.arange(8), start_sample=0, batch_schedule=constant(8)
    )
    start = time.monotonic()
    with pytest.raises(UserError, match="reading samples 16 to 23 takes longer than 1 seconds: is a disk"):
        list(loader)
    assert time.monotonic() - start < 120


def test_a_stopped_worker_is_an_error_in_time(monkeypatch):
    monkeypatch.setattr("mtjax.data.batches.loader.GRACE", 1.0)
    before = set(psutil.Process().children())
    loader = open_loader(
        settings(1, timeout=300.0), Numbers(100_000), rows=np.arange(8), start_sample=0, batch_schedule=constant(8)
    )
    next(loader)
    loader._timeout = 1.0
    for worker in workers_since(before):
        worker.suspend()
    with pytest.raises(UserError, match="no batch came for 2 seconds: the 1 worker processes that make them are stuck"):
        for _ in range(100):
            next(loader)
    assert not workers_since(before)


def test_a_killed_worker_is_an_error():
    before = set(psutil.Process().children())
    loader = open_loader(settings(1), Numbers(100_000), rows=np.arange(8), start_sample=0, batch_schedule=constant(8))
    next(loader)
    workers = workers_since(before)
    assert workers
    for worker in workers:
        worker.kill()
    with pytest.raises(UserError, match="the data loader failed: .*exit code -9"):
        for _ in range(100):
            next(loader)


def test_closing_ends_the_workers():
    before = set(psutil.Process().children())
    loader = open_loader(settings(2), Numbers(10_000), rows=np.arange(8), start_sample=0, batch_schedule=constant(8))
    next(loader)
    loader.close()
    assert not workers_since(before)
    with pytest.raises(StopIteration):
        next(loader)
