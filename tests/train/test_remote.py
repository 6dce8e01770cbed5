"""Runs in an object store: the same numbers, one start at a time, and nothing lost when a checkpoint is damaged."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtjax import storage
from mtjax.errors import UserError
from mtjax.storage import filesystem, names_in, read_bytes, write_bytes
from mtjax.train.checkpoints.remote import RemoteCheckpoints
from mtjax.train.checkpoints.saves import Saves
from mtjax.train.folder.remote import RemoteFolder
from tests.end_to_end.runs import Launcher, free_port
from tests.object_store import s3_server
from tests.tiny import program_of, run_steps
from tests.train.test_checkpoint import flat, same

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


def checkpoints(name: str) -> RemoteCheckpoints:
    return RemoteCheckpoints(Path(f"s3://bucket/{name}"), keep_last=2, keep_every=None, before_page=lambda: None)


def test_every_bit_comes_back_and_damage_is_passed_over(server: str, caplog: pytest.LogCaptureFixture) -> None:
    program, url = program_of("2x4"), "s3://bucket/damage"
    saving = checkpoints("damage")
    state, states = program.initialize(0), {}
    for step in (1, 2, 3):
        state, _ = run_steps(program, 1, state)
        states[step] = flat(state)
        saving.save(state, program.config, 10 * step)
    saving.close()
    write_bytes(f"{url}/4/state/parameters.embedding/c/0/0", b"of a save that was killed")
    again = checkpoints("damage")
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
    assert "/damage/3 is damaged and skipped (parameters.embedding is not what was saved" in caplog.text
    assert names_in(url) == ["2", "damaged-3"]


def test_a_second_start_is_refused_and_a_dead_one_is_taken_over(server: str, tmp_path: Path) -> None:
    said: list[str] = []
    first = RemoteFolder("s3://bucket/lock", tmp_path / "first", lease=2, heartbeat=0.2)
    first.claim(said.append)
    (first.work / "metrics.jsonl").write_text("one\n")
    second = RemoteFolder("s3://bucket/lock", tmp_path / "second", lease=2, heartbeat=0.2)
    with pytest.raises(
        UserError, match=rf"^s3://bucket/lock is in use: process {os.getpid()} on \S+ is training there"
    ):
        second.claim(said.append)
    first.release()
    assert read_bytes("s3://bucket/lock/metrics.jsonl") == b"one\n"
    dead = {"host": "another", "pid": 1, "token": "x", "beat": 1}
    write_bytes("s3://bucket/lock/.lock", json.dumps(dead).encode())
    second.claim(said.append)
    assert (
        said[-1] == "note    took s3://bucket/lock over from process 1 on another, which ended without giving it back"
    )
    assert (second.work / "metrics.jsonl").read_text() == "one\n"
    second.release()
    assert names_in("s3://bucket/lock") == ["metrics.jsonl"]


def test_a_save_that_can_not_be_written_is_said(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of("2x4")
    saving = checkpoints("gone")
    monkeypatch.setattr(storage, "PAUSES", (0.0,))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://localhost:{free_port()}")
    monkeypatch.setattr("mtjax.train.checkpoints.remote.write_arrays", refuse)
    saving.save(program.initialize(0), program.config, 0)
    with pytest.raises(
        UserError, match=r"^a checkpoint was not saved in s3://bucket/gone: writing .* failed 2 times: no"
    ):
        saving.close()


def test_a_save_that_fails_is_tolerated_like_one_on_a_disk(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, said = program_of("2x4"), list[str]()
    state, saving = run_steps(program, 1)[0], checkpoints("tolerated")
    saves = Saves(saving, 1, lambda: "go on", said.append)
    with monkeypatch.context() as lost:
        lost.setattr(storage, "PAUSES", (0.0,))
        lost.setattr("mtjax.train.checkpoints.remote.write_arrays", refuse)
        saves.save(state, program.config, 0, last=False)
        saves.finish()
    assert said[0].startswith("note    step 1 could not be saved (a checkpoint was not saved in s3://bucket/tolerated")
    assert saving.newest_on_disk() is None
    saves.save(state, program.config, 0, last=True)
    assert said[1:] == [] and saving.newest_on_disk() == Path("s3:/bucket/tolerated/1")


def refuse(*_: object) -> None:
    raise ValueError("no route to host")


def test_a_run_in_a_store_stops_and_goes_on_like_one_on_a_disk(
    server: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    launcher = Launcher.prepare(tmp_path_factory.mktemp("remote"))
    filesystem("s3://bucket").pipe_file("bucket/text.txt", (launcher.folder / "text.txt").read_bytes())
    whole = launcher.train_here("whole", "--steps", "8")
    words = ["--data", "s3://bucket/text.txt"]
    first = launcher.run_here("unused", *words, "--out", "s3://bucket/run", "--steps", "5", is_told=False)
    assert first.code == 0, first.stderr
    assert "next    mtjax train --config s3://bucket/run/config.toml --resume --steps 10" in first.stdout
    refused = launcher.run_here("unused", *words, "--out", "s3://bucket/run", "--steps", "5", is_told=False)
    assert refused.code == 2
    assert "error: --out s3://bucket/run holds a run already: add --resume" in refused.stderr
    more = ["--config", "s3://bucket/run/config.toml", "--resume", "--steps", "8"]
    second = launcher.run_here("unused", *more, data="s3://bucket/text.txt", is_told=False)
    assert second.code == 0, second.stderr
    assert "resumed from step 5 in s3://bucket/run/checkpoints" in second.stdout
    lines = read_bytes("s3://bucket/run/metrics.jsonl").decode().splitlines()
    assert {entry["step"]: entry["loss"] for entry in map(json.loads, lines)} == whole.losses
    page = json.loads(read_bytes("s3://bucket/run/checkpoints/8/page/metadata"))
    assert page["fingerprints"] == whole.fingerprints(8)
    assert {"config.toml", "loss.png", "metrics.jsonl", "tensorboard", "tokenizer.json"} <= set(
        names_in("s3://bucket/run")
    )
    assert ".lock" not in names_in("s3://bucket/run")
    assert not [t for t in threading.enumerate() if t.name.startswith("remote")]
