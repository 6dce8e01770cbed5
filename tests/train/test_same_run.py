"""Processes of one run that have other settings, or read other text."""

import json
import re
import socket
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import jax
import pytest

from mtjax.compile import programs
from mtjax.config import Config, replace
from mtjax.data import DataPosition, NeighbourFile, SampleOrder, TrainingText
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.train import loop, same_run
from mtjax.train.objective import PRETRAINING
from mtjax.train.options import Options
from mtjax.train.same_run import check_same_settings, check_same_text
from tests.data.corpora import texts, write_jsonl
from tests.tiny import tiny_config
from tests.train.test_run_tokenizer import trained

TEXT = TrainingText("books.txt", "a" * 32, 9)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the processes said; each call adds what this one says, and is answered with all."""
    said: list[str] = []

    def gather(name: str, text: str) -> list[str]:
        said.append(text)
        return list(said)

    monkeypatch.setattr(same_run, "num_processes", lambda: 2)
    monkeypatch.setattr(same_run, "all_gather_text", gather)
    return said


def test_processes_may_differ_in_what_is_theirs_alone(meeting: list[str]) -> None:
    own = {"data": "a.txt", "evaluate": ["lambada=dev.jsonl"], "cache_dir": Path("/scratch/0")}
    other = {"data": "/mnt/a.txt", "evaluate": ["lambada=/mnt/dev.jsonl"], "cache_dir": Path("/scratch/1")}
    # One may have its place from options, and the other from variables of the environment.
    check_same_settings(replace(Config(), coordinator="gpu-0:1", num_processes=2, process_id=0, **own))
    check_same_settings(replace(Config(), **other))
    assert len(meeting) == 2


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        (
            "learning_rate",
            0.125,
            r"process 1 has --learning-rate 0\.125, and process 0 has --learning-rate 0\.\d+: s",
        ),
        (
            "resume",
            True,
            "process 1 has --resume, and process 0 has --no-resume: start all processes with the",
        ),
        ("keep_every", 7, "process 1 has --keep-every 7, and process 0 has no --keep-every"),
        ("evaluate", ["lambada=a"], "process 1 has --evaluate lambada=a, and process 0 has no --evaluate"),
        ("local_checkpoints", Path("/x"), "process 1 has --local-checkpoints /x, and process 0 has no --local-checkpo"),
        ("out", Path("/shared/run"), "process 1 has --out /shared/run, and process 0 has no --out"),
        ("prompt", "In the", "process 1 has --prompt 'In the', and process 0 has --prompt 'The '"),
    ],
)
def test_another_setting_is_named_as_it_is_typed_with_both_values(
    setting: str, value: object, said: str, meeting: list[str]
) -> None:
    check_same_settings(Config(), Path("runs/gpt-N"))
    with pytest.raises(UserError, match=said):
        check_same_settings(replace(Config(), **{setting: value}), Path("runs/gpt-N"))


def test_another_version_of_jax_is_named(meeting: list[str]) -> None:
    check_same_settings(Config())
    facts = json.loads(meeting[0])
    meeting[0] = json.dumps(facts | {"versions": facts["versions"] | {"jax": "0.0.1"}})
    said = rf"process 1 has jax {re.escape(jax.__version__)}, and process 0 has jax 0\.0\.1: install the same versions"
    with pytest.raises(UserError, match=said):
        check_same_settings(Config())


def test_a_process_without_gpus_is_named(meeting: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of others would wait for it."""
    monkeypatch.setattr(same_run, "has_gpu", lambda: True)
    check_same_settings(Config())
    monkeypatch.setattr(same_run, "has_gpu", lambda: False)
    with pytest.raises(UserError, match="process 1 has CPUs, and process 0 has GPUs: start all processes with GPUs"):
        check_same_settings(Config())


def test_a_folder_may_be_spelled_in_several_ways_but_not_be_another(
    meeting: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    (tmp_path / "round").symlink_to("round")
    monkeypatch.chdir(tmp_path)
    names = ("runs/a", tmp_path / "runs/a", "link/a", "runs/../runs/a")
    for name in names:
        check_same_settings(replace(Config(), out=Path(name)))
    assert len(meeting) == len(names)
    said = rf"process 4 has --out round/a \({tmp_path}/round/a\), and process 0 has --out runs/a \({tmp_path}/runs/a\)"
    with pytest.raises(UserError, match=said):
        check_same_settings(replace(Config(), out=Path("round/a")))
    del meeting[1:]
    monkeypatch.chdir(tmp_path / "runs")
    # On one machine this is another folder; on another, the shared one may be mounted elsewhere.
    said = (
        rf"process 1 has --out runs/a \({tmp_path}/runs/runs/a\), and process 0 has --out runs/a \({tmp_path}/runs/a\)"
    )
    with pytest.raises(UserError, match=said):
        check_same_settings(replace(Config(), out=Path("runs/a")))
    del meeting[1:]
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-1")
    check_same_settings(replace(Config(), out=Path("runs/a")))


def test_a_folder_that_results_without_out_is_compared(meeting: list[str]) -> None:
    """Each name has its own numbers, so one process might write to runs/gpt-1 and another to runs/bert-7."""
    check_same_settings(Config(), Path("runs/gpt-N"))
    check_same_settings(Config(), Path("runs/gpt-N"))
    said = r"process 2 has no --out and the folder runs/bert-N \(/\S+\), and process 0 has .* runs/gpt-N \(/\S+\): name"
    with pytest.raises(UserError, match=said):
        check_same_settings(Config(), Path("runs/bert-N"))


def test_settings_are_compared_before_a_mesh_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning uses the devices of all processes: one with another --mesh would not take part."""

    def refuse(config: Config, default: Path | None = None) -> None:
        raise UserError(f"compared with {default}")

    def choose(config: Config, devices: int, kind: str) -> MeshShape:
        raise AssertionError("a mesh was chosen first")

    monkeypatch.setattr(loop, "check_same_settings", refuse)
    with pytest.raises(UserError, match="compared with runs/books-N"):
        loop.train(replace(Config(), mesh="auto"), "books", Options(compile_cache="off"), choose_mesh=choose)
    monkeypatch.setattr(programs, "check_same_settings", refuse)
    monkeypatch.setattr(programs, "fastest_mesh", choose)
    with pytest.raises(UserError, match="compared with None"):
        programs.compile_run(replace(Config(), mesh="auto"), str(tmp_path))


POSITION = DataPosition(SampleOrder(0, (40,)), (TEXT,))


def test_a_text_of_another_content_is_named(meeting: list[str]) -> None:
    read = {"training text": (TEXT,), "validation text": (TEXT,)}
    check_same_text(POSITION, read)
    moved = with_fields(TEXT, name="/mnt/books.txt")
    check_same_text(DataPosition(POSITION.order, (moved,)), {**read, "training text": (moved,)})
    said = (
        r"process 2 has other validation text than process 0: books\.txt \(9 documents, digest b*\), and books\.txt \("
    )
    with pytest.raises(UserError, match=said):
        check_same_text(POSITION, {**read, "validation text": (with_fields(TEXT, content="b" * 32),)})
    meeting.pop()
    longer = with_fields(TEXT, documents=10, first=3)
    with pytest.raises(UserError, match=r"other training text than .*: books\.txt \(10 documents from number 3, di"):
        check_same_text(DataPosition(POSITION.order, (longer,)), {**read, "training text": (longer,)})
    meeting.pop()
    with pytest.raises(UserError, match="process 2 has 2 files of training text, and process 0 has 1: give all mach"):
        check_same_text(POSITION, {**read, "training text": (TEXT, TEXT)})
    meeting.pop()
    with pytest.raises(UserError, match="process 2 has another order of samples than process 0: 44 samples, begun aft"):
        check_same_text(DataPosition(SampleOrder(0, (44,)), (TEXT,)), read)
    meeting.pop()
    neighbours = (NeighbourFile("train", 40, "c" * 32),)
    with pytest.raises(UserError, match="other neighbours of samples than process 0: train with 40 samples, digest c"):
        check_same_text(DataPosition(POSITION.order, (TEXT,), neighbours), read)


def test_pretraining_describes_its_validation_text(tmp_path: Path) -> None:
    for name, number in (("train", 60), ("valid", 40), ("other", 41)):
        write_jsonl(tmp_path / f"{name}.jsonl", texts(60)[-number:])
    given = {"train_data": f"{tmp_path}/train.jsonl", "cache_dir": tmp_path / "cache", "vocab_size": None}
    given |= {"tokenizer": str(trained(tmp_path / "tokenizer/tokenizer.json", 1)), "steps": 2, "valid_batches": 1}

    def read(valid: str) -> dict[str, Any]:
        config = tiny_config(**given, valid_data=f"{tmp_path}/{valid}.jsonl", valid_every=1)
        return dict(PRETRAINING.load_data(config, tmp_path)[1].read)

    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "valid.jsonl").read_bytes())
    own, copied, other = (read(name) for name in ("valid", "copy", "other"))
    assert own["training text"] == other["training text"]
    assert own["validation text"][0].is_same(copied["validation text"][0])
    assert not own["validation text"][0].is_same(other["validation text"][0])
