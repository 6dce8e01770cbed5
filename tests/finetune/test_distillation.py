"""`mtjax finetune --teacher` as it is typed: what is logged, resuming, and teachers that don't fit."""

import json
import re

import numpy as np
import pytest

from mtjax.train.observability.metrics import read_metrics
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, write_folder
from tests.finetune.test_chats import chat, folder, resumed_to_the_bit
from tests.finetune.test_run import finetune
from tests.finetune.test_run import folder as rows_folder

__all__ = ["folder", "rows_folder"]


@pytest.fixture(scope="module")
def teachers(folder, tmp_path_factory):
    """`other`, a GPT-2 like the student, but for its numbers; `words` and `few` have other tokens, and fewer."""
    place = tmp_path_factory.mktemp("teachers")
    tensors = {key: np.roll(array, 1, axis=-1) for key, array in random_tensors(gpt2_shapes()).items()}
    for name, words in (("other", 300), ("words", 300), ("few", 299)):
        tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:words]
        write_folder(place / name, tensors, GPT2_CONFIG | {"vocab_size": words}, tokenizer=True)
    said = json.loads((place / "words" / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (place / "words" / "tokenizer.json").write_text(json.dumps(said))
    return place


@pytest.mark.long
def test_a_student_s_run_is_resumed_to_the_bit_and_both_losses_are_logged(folder, teachers, tmp_path, capsys):
    run = tmp_path / "run"
    every = ["--checkpoint-every", "4", "--valid-every", "4", "--keep-last", "9", "--log-every", "1"]
    taught = ["--teacher", f"hf:{teachers / 'other'}", "--teacher-weight", "0.75", "--learning-rate", "1e-2"]
    assert chat(folder, run, *taught, "--epochs", "3", *every, "--inspect") == 0
    assert re.search(r"outside the step: teacher's weights \d.*, by formula", capsys.readouterr().out)
    entries = read_metrics(run / "metrics.jsonl")
    for entry in entries:
        assert entry["loss"] == pytest.approx(0.25 * entry["hard_loss"] + 0.75 * entry["soft_loss"], rel=1e-6)
    assert entries[-1]["soft_loss"] < 0.7 * entries[0]["soft_loss"]
    assert not [name for name in resumed_to_the_bit(run)[1] if "teacher" in name]


@pytest.mark.parametrize(
    ("teacher", "words", "message"),
    [
        ("nowhere", [], "does not exist"),
        ("few", [], "has a vocabulary of 299, but the student's has 300"),
        ("words", [], "has another vocabulary: its token"),
        ("other", ["--label-smoothing", "0.1"], "--label-smoothing and --z-loss cannot be combined with --teacher"),
        ("other", ["--teacher-weight", "0"], "teacher_weight is 0.0, and must be above 0 and at most 1"),
        ("other", ["--teacher-width", "8"], "--teacher-width has no effect"),
    ],
)
def test_a_teacher_of_tokens_that_does_not_fit_is_refused(teacher, words, message, folder, teachers, tmp_path, capsys):
    assert chat(folder, tmp_path / "out", "--teacher", f"hf:{teachers / teacher}", *words) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_teacher_of_another_task_is_refused(rows_folder, teachers, tmp_path, capsys):
    assert finetune(rows_folder, tmp_path / "out", "--teacher", f"hf:{teachers / 'other'}") == 2
    assert "has a language head, but the student has a head for classification" in capsys.readouterr().err
