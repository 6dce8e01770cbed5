"""Barriers between processes, which threads and a dictionary stand in for. Real ones are in end_to_end."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.runtime.checkpoints import remote
from mtjax.runtime.checkpoints.corruption import read_on_all_processes
from mtjax.runtime.processes import coordination
from mtjax.runtime.processes.coordination import all_gather_text, gather_text_at


class Service:
    """jax's coordination service for two threads. Instead of a timeout it has an error once both wait in vain."""

    def __init__(self) -> None:
        self.texts = dict[str, str]()
        self._waiting, self._changed = dict[str, int](), threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        assert key not in self.texts, f"{key} is set twice"
        self.texts[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        return [(key, text) for key, text in self.texts.items() if key.startswith(prefix)]

    def wait_at_barrier(self, key: str, timeout_ms: int) -> None:
        with self._changed:
            self._waiting[key] = self._waiting.get(key, 0) + 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting[key] == 2 or len(self._waiting) == 2)
            if self._waiting[key] < 2:
                raise jax.errors.JaxRuntimeError("nobody else comes")


def in_both(monkeypatch: pytest.MonkeyPatch, body: Callable[[int], Any]) -> list[Any]:
    """What `body` returns or raises in each of two processes."""
    service, me = Service(), threading.local()
    monkeypatch.setattr(coordination, "service", lambda: service)
    monkeypatch.setattr(coordination, "num_processes", lambda: 2)
    monkeypatch.setattr(coordination, "this_process", lambda: me.number)

    def run(number: int) -> Any:
        me.number = number
        try:
            return body(number)
        except UserError as e:
            return e

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def test_processes_meet_whatever_each_calls_what_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder's spelling is in no key: `runs/a` and `/home/me/runs/a` would wait for each other."""
    names = ["runs/a", str(tmp_path / "runs/a")]
    monkeypatch.setattr(coordination, "_barrier_numbers", repeat(0))
    assert in_both(monkeypatch, lambda i: read_on_all_processes(names[i], tmp_path, lambda: i)) == [0, 1]


def test_processes_at_different_barriers_are_told_so_and_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "_barrier_numbers", repeat(0))
    errors = in_both(monkeypatch, lambda i: all_gather_text(["the tea", "the milk"][i], "hot"))
    said = "process 1 is at the barrier 'the milk', and process 0 is at 'the tea': start all processes with the same op"
    assert [str(e)[: len(said)] for e in errors] == [said, said]


def test_who_is_missing_is_named_with_what_this_process_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = in_both(monkeypatch, lambda i: gather_text_at(f"save/{i}", "reading", "", 600, shown=f"reading runs/{i}"))
    assert [str(e).partition(" within")[0] for e in errors] == [
        "process 1 did not reach the barrier 'reading runs/0'",
        "process 0 did not reach the barrier 'reading runs/1'",
    ]


def test_a_step_is_saved_in_a_store_twice_as_the_newest_and_as_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes say under a key that their shards are written, and a key can be set once."""
    service, state = Service(), SimpleNamespace(step=7)
    for name in ("copy_pieces", "fingerprints_later", "checkpoint_metadata", "layer_orders", "state_arrays"):
        monkeypatch.setattr(remote, name, lambda *_, **__: {})
    monkeypatch.setattr(remote, "write_arrays", lambda *_: None)
    monkeypatch.setattr(remote, "service", lambda: service)
    monkeypatch.setattr(remote, "num_processes", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for name in ("checkpoints", "best"):
        saving = remote.RemoteCheckpoints(
            Path(f"s3:/bucket/{name}"), keep_last=1, keep_every=None, before_metadata=lambda: None
        )
        saving.save(cast(Any, state), Config(), 0)
        saving.wait()
    assert list(service.texts.values()) == [remote.DONE, remote.DONE]
