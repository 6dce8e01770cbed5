import multiprocessing
import os
import time

import numpy as np
import pytest

from mtjax.config import Data
from mtjax.data.cache import Cache, cached_arrays, digest
from mtjax.errors import UserError


def test_where_it_is(monkeypatch, tmp_path):
    assert Cache.of(Data(cache_dir=tmp_path / "x")).root == tmp_path / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.of(Data()).root == tmp_path / "mtjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Cache.of(Data()).root == tmp_path / ".cache" / "mtjax"


def test_named_by_content():
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})


def test_nothing_remains_of_a_build_that_fails(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        Cache(tmp_path).folder("x", {}, build)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []
    folder = Cache(tmp_path).folder("x", {}, lambda folder: (folder / "whole").touch())
    assert {p.name for p in folder.iterdir()} == {"whole", "made_from.json"}


def _slow(root, queue):
    def build(folder):
        queue.put("built")
        time.sleep(0.5)
        (folder / "by").write_text(str(os.getpid()))

    queue.put((Cache(root).folder("x", {"a": 1}, build) / "by").read_text())


def test_many_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")  # a test before may have started JAX, whose threads a fork loses
    queue = context.Queue()
    processes = [context.Process(target=_slow, args=(tmp_path, queue)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in range(7)]
    for process in processes:
        process.join()
    assert found.count("built") == 1
    assert len(set(found)) == 2


def test_two_builders_without_locks(tmp_path, monkeypatch):
    """Hosts that can't see each other's locks both build; the first rename wins, and neither fails."""
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(38, "no locks")))

    def inner(folder):
        (folder / "by").write_text("inner")

    def outer(folder):
        (folder / "by").write_text("outer")
        Cache(tmp_path).folder("x", {}, inner)

    assert (Cache(tmp_path).folder("x", {}, outer) / "by").read_text() == "inner"
    assert not list(tmp_path.glob(".*.tmp"))


def test_leftovers_of_the_dead_are_removed(tmp_path):
    final = Cache(tmp_path).folder("x", {}, lambda folder: None)
    host = os.uname().nodename
    dead, alive, elsewhere = (
        tmp_path / f".{final.name}.{name}.tmp"
        for name in (f"{host}.999999999.ab", f"{host}.{os.getpid()}.ab", "other.1.ab")
    )
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
    (final / "made_from.json").unlink()
    final.rmdir()
    Cache(tmp_path).folder("x", {}, lambda folder: None)
    assert [p.exists() for p in (dead, alive, elsewhere)] == [False, True, True]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?i)not a directory|file exists"):
        Cache(tmp_path / "file").folder("x", {}, lambda folder: None)


def test_a_changed_file_has_another_digest(tmp_path):
    (tmp_path / "x").write_text("one")
    first = Cache(tmp_path / "cache").file_digest(tmp_path / "x")
    assert first == Cache(tmp_path / "cache").file_digest(tmp_path / "x")
    (tmp_path / "x").write_text("other")
    assert first != Cache(tmp_path / "cache").file_digest(tmp_path / "x")


@pytest.mark.parametrize("kept", [False, True])
def test_arrays_are_the_same_with_and_without_a_cache(tmp_path, kept):
    calls = []

    def build(folder):
        calls.append(folder)
        large = np.zeros(3, np.int32)
        if folder is not None:
            large = np.lib.format.open_memmap(folder / "large.npy", "w+", np.int32, (3,))
        large[:] = (7, 8, 9)
        return {"small": np.arange(4), "large": large}

    for _ in range(2):
        arrays = cached_arrays(Cache(tmp_path) if kept else None, "x", {"a": 1}, build)
        assert {name: array.tolist() for name, array in arrays.items()} == {"small": [0, 1, 2, 3], "large": [7, 8, 9]}
    assert len(calls) == (1 if kept else 2)
