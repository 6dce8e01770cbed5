"""Processes of one run that have other settings, or read other text."""

import json
import re
from dataclasses import replace as with_fields
from pathlib import Path

import jax
import pytest

from mtjax.config import Config, replace
from mtjax.data import DataPosition, SampleOrder, TrainingText
from mtjax.errors import UserError
from mtjax.train import same_run
from mtjax.train.same_run import check_same_settings, check_same_text

TEXT = TrainingText("books.txt", "aa", 9)


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
    check_same_settings(replace(Config(), process_id=0, **own))
    check_same_settings(replace(Config(), process_id=1, **other))
    assert len(meeting) == 2


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("learning_rate", 0.125, r"process 1 has learning_rate 0\.125, and process 0 has 0\.\d+: start all processes"),
        ("resume", True, "process 1 has resume true, and process 0 has false"),
        ("keep_every", 7, "process 1 has keep_every 7, and process 0 has no value"),
        ("evaluate", ["lambada=a"], r"process 1 has evaluate \[\"lambada\"\], and process 0 has \[\]"),
        ("local_checkpoints", Path("/scratch"), 'process 1 has local_checkpoints "a path", and process 0 has no value'),
        ("out", Path("/shared/run"), 'process 1 has out "/shared/run", and process 0 has no value'),
    ],
)
def test_another_setting_is_named_with_both_values(setting: str, value: object, said: str, meeting: list[str]) -> None:
    check_same_settings(Config())
    with pytest.raises(UserError, match=said):
        check_same_settings(replace(Config(), **{setting: value}))


def test_another_version_of_jax_is_named(meeting: list[str]) -> None:
    check_same_settings(Config())
    meeting[0] = json.dumps(json.loads(meeting[0]) | {"jax": "0.0.1"})
    with pytest.raises(
        UserError, match=rf'process 1 has jax "{re.escape(jax.__version__)}", and process 0 has "0\.0\.1"'
    ):
        check_same_settings(Config())


def test_a_text_of_another_content_is_named(meeting: list[str]) -> None:
    position = DataPosition(SampleOrder(0, (40,)), (TEXT,))
    check_same_text(position)
    check_same_text(DataPosition(position.order, (with_fields(TEXT, name="/mnt/books.txt"),)))
    with pytest.raises(UserError, match=r"process 2 has another training text than process 0: books\.txt \(9 doc"):
        check_same_text(DataPosition(position.order, (with_fields(TEXT, content="bb"),)))
    meeting.pop()
    with pytest.raises(UserError, match="process 2 has 2 training texts, and process 0 has 1 training texts"):
        check_same_text(DataPosition(position.order, (TEXT, TEXT)))
    meeting.pop()
    with pytest.raises(UserError, match="process 2 has another order of samples than process 0"):
        check_same_text(DataPosition(SampleOrder(0, (44,)), (TEXT,)))
