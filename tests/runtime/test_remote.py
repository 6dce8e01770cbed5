"""Runs in an object store: the same numbers, one start at a time, and nothing lost when a checkpoint is damaged."""

import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtjax import storage
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.remote import RemoteCheckpoints
from mtjax.runtime.checkpoints.saves import Saves
from mtjax.storage import filesystem, names_in, read_bytes, write_bytes
from mtjax.train.folder.remote import RemoteFolder
from tests.end_to_end.runs import Launcher
from tests.object_store import Store, store_on
from tests.runtime.test_checkpoint import flat, same
from tests.tiny import program_of, run_steps

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["s3", "gs"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with store_on(request.param) as store:
        yield store


def checkpoints(url: str) -> RemoteCheckpoints:
    return RemoteCheckpoints(Path(url), keep_last=2, keep_every=None, before_metadata=lambda: None)


def test_every_bit_comes_back_and_damage_is_passed_over(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    program, url = program_of("2x4"), f"{store.url}/damage"
    saving = checkpoints(url)
    state, states = program.initialize(0), {}
    for step in (1, 2, 3):
        state, _ = run_steps(program, 1, state)
        states[step] = flat(state)
        saving.save(state, program.config, 10 * step)
    saving.close()
    write_bytes(f"{url}/4/state/parameters.embedding/c/0/0", b"of a save that was killed")
    again = checkpoints(url)
    for mesh in ("2x4", "4x2"):
        there = program_of(mesh)
        restored = again.restore(there.abstract_state, there.config)
        assert restored is not None and (restored.step, restored.consumed_samples, again.latest()) == (3, 30, 3)
        same(restored.state, states[3])
    assert names_in(url) == ["2", "3"]
    chunk = f"{url}/3/state/parameters.embedding/c/0/0"
    filesystem(url).rm_file(chunk)  # a missing one reads as zeros
    restored = again.restore(program.abstract_state, program.config)
    assert restored is not None and restored.step == 2
    same(restored.state, states[2])
    assert "/damage/3 is corrupted and skipped (parameters.embedding is not what was saved" in caplog.text
    assert names_in(url) == ["2", "damaged-3"]


def test_a_second_start_is_refused_and_a_dead_one_is_taken_over(store: Store, tmp_path: Path) -> None:
    said, url = list[str](), f"{store.url}/lock"
    first = RemoteFolder(url, tmp_path / "first", lease=60, heartbeat=0.2)  # in which it surely beats
    first.claim(said.append)
    (first.work / "metrics.jsonl").write_text("one\n")
    with pytest.raises(UserError, match=rf"^{url} is in use: process {os.getpid()} on \S+ is training there"):
        RemoteFolder(url, tmp_path / "second", lease=60, heartbeat=0.2).claim(said.append)
    second = RemoteFolder(url, tmp_path / "third", lease=2, heartbeat=0.2)
    first.release()
    assert read_bytes(f"{url}/metrics.jsonl") == b"one\n"
    dead = {"host": "another", "pid": 1, "token": "x", "beat": 1}
    write_bytes(f"{url}/.lock", json.dumps(dead).encode())
    second.claim(said.append)
    assert said[-1] == f"note    took over {url} from process 1 on another, which ended without releasing it"
    assert (second.work / "metrics.jsonl").read_text() == "one\n"
    second.release()
    assert names_in(url) == ["metrics.jsonl"]


def test_a_store_that_comes_back_costs_nothing_and_one_that_does_not_a_save(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, said, url = program_of("2x4"), list[str](), f"{store.url}/lost"
    state, saving = run_steps(program, 1)[0], checkpoints(url)
    saves = Saves(saving, 1, lambda: "go on", said.append)
    store.stop()
    back = threading.Timer(2, store.start)
    back.start()
    saves.save(state, program.config, 0)
    saves.finish()
    back.join()
    assert not said and saving.newest_on_disk() == Path(f"{url}/1")
    store.stop()
    with monkeypatch.context() as short:
        short.setattr(storage, "PATIENCE", 0.0)
        short.setattr(storage, "RETRIES", 1)
        saves.save(state, program.config, 0)
        saves.finish()
    store.start()
    (note,) = said
    assert re.match(
        rf"note    step 1 could not be saved \(a checkpoint could not be saved in {url}: writing {url}/1/state failed "
        r"for \d s: ABORTED: .*; is the store reachable\?\); the run ends if more than 1 saves in a row fail",
        note,
    )
    saves.save(state, program.config, 0, must_succeed=True)
    assert said == [note]


@pytest.mark.parametrize("store", ["s3", pytest.param("gs", marks=pytest.mark.exhaustive)], indirect=True)
def test_a_run_in_a_store_stops_and_goes_on_like_one_on_a_disk(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    launcher, url = Launcher.prepare(tmp_path_factory.mktemp("remote")), f"{store.url}/run"
    text = f"{store.url}/text.txt"
    write_bytes(text, (launcher.folder / "text.txt").read_bytes())
    whole = launcher.train_here("whole", "--steps", "8")
    first = launcher.run_here("unused", "--out", url, "--steps", "5", data=text, is_told=False)
    assert first.code == 0, first.stderr
    assert f"next    mtjax train --config {url}/config.toml --resume --steps 10" in first.stdout
    refused = launcher.run_here("unused", "--out", url, "--steps", "5", data=text, is_told=False)
    assert refused.code == 2
    assert f"error: --out {url} holds a run already: add --resume" in refused.stderr
    more = ["--config", f"{url}/config.toml", "--resume", "--steps", "8"]
    second = launcher.run_here("unused", *more, data=text, is_told=False)
    assert second.code == 0, second.stderr
    assert f"resumed from step 5 in {url}/checkpoints" in second.stdout
    lines = read_bytes(f"{url}/metrics.jsonl").decode().splitlines()
    assert {entry["step"]: entry["loss"] for entry in map(json.loads, lines)} == whole.losses
    page = json.loads(read_bytes(f"{url}/checkpoints/8/page/metadata"))
    assert page["fingerprints"] == whole.fingerprints(8)
    assert {"config.toml", "loss.png", "metrics.jsonl", "tensorboard", "tokenizer.json"} <= set(names_in(url))
    assert ".lock" not in names_in(url)
    assert not [t for t in threading.enumerate() if t.name.startswith("remote")]
