"""RACE: its folders, its rows, and a run on them."""

import json

import jax
import numpy as np
import pytest

from mtjax.commands.finetune import main
from mtjax.commands.predict import main as predict
from mtjax.config import Config, replace
from mtjax.convert.model_types.registry import family_of_model
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.files import read_task
from mtjax.finetune.samples import Epochs, RowEncoder
from mtjax.finetune.tasks.race import RACE, filled
from mtjax.models.finetuned import choice_losses
from mtjax.models.heads import class_losses
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.train.observability.metrics import read_metrics
from tests.finetune.tiny_bert import race_folder, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    folder = tmp_path_factory.mktemp("race")
    write_config(folder)
    race_folder(folder / "RACE", train=8, dev=4)
    return folder


def encoder_of(folder) -> RowEncoder:
    return RowEncoder(open_tokenizer(f"bert:{folder / 'vocab.txt'}"), "bert")


def config_of(data, **settings) -> Config:
    return replace(Config(), task="race", data=str(data), **settings)


def test_a_folder_has_four_rows_for_each_question(folder):
    rows = read_task(config_of(folder / "RACE"), RACE)
    assert (len(rows.train), len(rows.held_out[0][1]), rows.notes) == (16, 8, [])
    first = rows.train[0]  # the files by their names: high before middle
    assert (first.name, first.part, first.label) == ("high/1.txt#1", "high", "B")
    assert first.texts[1] == "The dog lives in rome ."
    encoder = encoder_of(folder)
    samples = RACE.encoded(rows.train, encoder, config_of(folder), "training").samples(64)
    assert (len(samples), samples.group) == (64, 4)
    for row, question in enumerate(first.texts[:4]):
        pair = encoder.encode([(question, first.texts[4])])[0]
        assert samples.rows[row] == encoder.format.row(pair, 64)
        assert samples[row]["label"] == 1


def test_questions_are_filled_or_continued():
    assert filled("It is _ , I say.", "so") == "It is so , I say."
    assert filled("What is it?", "A bird.") == "What is it? A bird."


def test_long_questions_end_at_128_tokens_and_articles_where_the_row_does(folder):
    article = {"article": "old " * 300, "questions": ["red " * 200], "options": [["cat"] * 4], "answers": ["C"]}
    (folder / "long.jsonl").write_text(json.dumps(article))
    examples = RACE.examples(folder / "long.jsonl", Config()).rows
    row, first = RACE.encoded(examples, encoder_of(folder), Config(), "").samples(400).rows[3]
    assert (first, len(row)) == (130, 400)


def test_a_pass_keeps_choices_side_by_side(folder):
    rows = read_task(config_of(folder / "RACE"), RACE)
    samples = RACE.encoded(rows.train, encoder_of(folder), config_of(folder), "training").samples(64)
    order = [Epochs(samples, 3, 128)[k]["tokens"].tolist() for k in range(128)]
    places = [[samples[k]["tokens"].tolist() for k in range(n, n + 4)] for n in range(0, 64, 4)]
    for start in (0, 64):
        groups = [order[k : k + 4] for k in range(start, start + 64, 4)]
        assert sorted(groups) == sorted(places)
        assert groups != places


def test_bad_questions_are_counted_and_named(folder, tmp_path):
    good = json.loads((folder / "RACE" / "train" / "high" / "1.txt").read_text())
    bad = good | {"answers": ["E"], "options": [["x"] * 4, ["x"] * 3], "questions": ["one _", "two"]}
    lines = [json.dumps(good), json.dumps(bad), "{", json.dumps(good)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    examples = RACE.examples(tmp_path / "rows.jsonl", Config())
    assert len(examples.rows) == 4
    assert "3 of 7 questions" in examples.note
    assert (
        "line 2 question 1 has the answer 'E', not A, B, C or D; line 2 question 2 does not have 4 options"
        in examples.note
    )
    (tmp_path / "other.jsonl").write_text('{"text": "a", "label": "b"}\n')
    with pytest.raises(UserError, match="line 1 has no article: is it the file of another task"):
        RACE.examples(tmp_path / "other.jsonl", Config())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty contains no \*.txt"):
        RACE.examples(tmp_path / "empty", Config())


def test_the_loss_is_over_the_choices_of_each_question():
    random = np.random.default_rng(0)
    outputs, right = random.normal(size=(12, 1)), np.array([2, 0, 3])
    logits = outputs.reshape(3, 4)
    expected = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), right]
    found = np.asarray(choice_losses(class_losses, outputs, np.repeat(right, 4), 4))
    np.testing.assert_allclose(found, np.repeat(expected, 4), rtol=1e-6)


def run(folder, out, *words: str) -> int:
    begin = ["--task", "race", "--config", str(folder / "tiny.toml"), "--data", str(folder / "RACE")]
    return main([*begin, "--mesh", "2x1", "--epochs", "1", "--out", str(out), *words])


def test_a_question_s_choices_are_not_parted(folder, tmp_path, capsys):
    assert run(folder, tmp_path / "out", "--global-batch-size", "12") == 2
    assert "global_batch_size on each data rank is 6, and a question has 4 choices" in capsys.readouterr().err


def test_a_decoder_s_choices_have_no_class_in_transformers():
    gpt = replace(Config(), head="choices", num_labels=4, vocab_size=250).model
    with pytest.raises(UserError, match="gpt2, does not support head choices"):
        family_of_model(gpt)


@pytest.mark.long
def test_a_run_scores_levels_apart_and_predictions_are_its_own(folder, tmp_path, capsys):
    out, answers = tmp_path / "run", tmp_path / "answers.jsonl"
    assert run(folder, out) == 0
    last = read_metrics(out / "metrics.jsonl")[-1]
    assert last["step"] == 8  # 16 questions of 4 choices, in batches of 8 rows
    assert last["valid_accuracy"] == (last["valid_accuracy_middle"] + last["valid_accuracy_high"]) / 2
    assert find_weights(out).config.finetuning.labels == ("A", "B", "C", "D")
    capsys.readouterr()
    assert predict(["--from", str(out), "--data", str(folder / "RACE" / "dev"), "--out", str(answers)]) == 0
    best = max(e.get("valid_accuracy", 0.0) for e in read_metrics(out / "metrics.jsonl"))
    assert f"accuracy {best:.4f}" in capsys.readouterr().err
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows[:3]] == ["high/1.txt#1", "high/1.txt#2", "high/3.txt#1"]
    assert all(sum(row["probabilities"].values()) == pytest.approx(1) for row in rows)
