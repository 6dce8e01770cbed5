"""SQuAD: its files, windows against those of the `tokenizers` library, answers, official scores, and a run."""

import json
from dataclasses import replace as with_fields

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.commands.ensemble import main as ensemble
from mtjax.commands.finetune import main
from mtjax.commands.predict import main as predict
from mtjax.config import Config, replace
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.samples import RowEncoder
from mtjax.finetune.tasks.squad import SQUAD1, SQUAD2, Question
from mtjax.finetune.tasks.windows import Windows
from mtjax.train.observability.metrics import read_metrics
from tests.finetune.tiny_bert import squad_file, write_config

pytestmark = pytest.mark.usefixtures("bare_end")
LENGTH, STRIDE = 32, 10
OFFICIAL = (
    ("the 10th and 11th centuries", ("10th and 11th centuries", "in the 10th and 11th centuries"), 1, 1.0),
    ("Rollo's", ("Rollo", "rollos."), 1, 1.0),
    ("A cat, an apple \u2014 the   end", ("cat apple end", "cat, apple \u2014 end"), 1, 1.0),
    ("", (), 1, 1.0),
    ("France", (), 0, 0.0),
    ("", ("France",), 0, 0.0),
    ("the", ("a", "an"), 1, 1.0),
    ("Denmark Norway Norway", ("Denmark, Iceland and Norway", "Norway"), 0, 0.5714285714285715),
    ("U.S. $5.00", ("us 500", "US"), 1, 1.0),
    ("Theatre and another", ("theatre another the and",), 0, 1.0),
    ("\u00cele-de-France", ("Ile de France", "\u00eeledefrance"), 1, 1.0),
)
"""Answers, right ones, and what evaluate-v2.0.py says of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    folder = tmp_path_factory.mktemp("squad")
    write_config(folder)
    squad_file(folder / "train-v2.0.json", 6, impossible=True)
    squad_file(folder / "dev-v2.0.json", 6, impossible=True)
    squad_file(folder / "long.json", 3, impossible=True, long=True)
    squad_file(folder / "plain.json", 3, impossible=False)
    return folder


def windows_of(folder, examples, task=SQUAD2, **options) -> Windows:
    tokenizer = open_tokenizer(f"bert:{folder / 'vocab.txt'}")
    return task.encoded(examples, RowEncoder(tokenizer, "bert"), replace(Config(), doc_stride=STRIDE, **options))


def test_windows_are_those_of_the_library_and_labels_stand_at_the_answer(folder):
    examples = SQUAD2.examples(folder / "long.json", Config()).rows
    encoded = windows_of(folder, examples)
    samples = encoded.samples(LENGTH)
    library = open_tokenizer(f"bert:{folder / 'vocab.txt'}")._tokenizer
    rows, labelled = iter(range(len(samples))), 0
    for example in examples:
        question = library.encode(example.question, add_special_tokens=False).ids
        library.enable_truncation(LENGTH - len(question) - 3, stride=LENGTH - len(question) - 3 - STRIDE)
        context = library.encode(example.context, add_special_tokens=False)
        library.no_truncation()
        for part in (context, *context.overflowing):
            row = next(rows)
            ids, first = samples.rows[row]
            assert ids == [2, *question, 3, *part.ids, 3]
            assert first == len(question) + 2
            start, end = samples.labels[row]
            if not example.answers:
                assert (start, end) == (0, 0)
                continue
            text, at = example.answers[0]
            inside = part.offsets[0][0] <= at and at + len(text) <= part.offsets[-1][1]
            assert (start > 0) == inside
            if inside:
                span = part.offsets[start - first][0], part.offsets[end - first][1]
                assert example.context[slice(*span)] == text
                labelled += 1
    assert next(rows, None) is None
    assert labelled >= 3  # each question that has an answer, in one window at least


def logits_for(encoded: Windows, samples, random) -> np.ndarray:
    return random.normal(size=(len(samples), LENGTH, 2)).astype(np.float32)


@pytest.mark.parametrize("longest", [1, 4])
def test_the_best_answer_is_that_of_all_spans_of_all_windows(longest, folder):
    examples = SQUAD2.examples(folder / "long.json", Config()).rows
    encoded = windows_of(folder, examples, n_best=LENGTH, max_answer_length=longest)
    samples = encoded.samples(LENGTH)
    logits = logits_for(encoded, samples, np.random.default_rng(0))
    lines = encoded.lines(logits)
    assert [line["id"] for line in lines] == [example.id for example in examples]
    for number, (example, line) in enumerate(zip(examples, lines, strict=True)):
        best, null = (-np.inf, ""), np.inf
        for row, window in enumerate(encoded.windows):
            if window.question != number:
                continue
            null = min(null, float(logits[row, 0].astype(np.float64).sum()))
            ids, first = samples.rows[row]
            for start in range(first, len(ids) - 1):
                for end in range(start, min(start + longest, len(ids) - 1)):
                    places = encoded.characters[number][window.begin + np.array([start, end]) - first]
                    score = float(logits[row, start, 0]) + float(logits[row, end, 1])
                    best = max(best, (score, example.context[places[0][0] : places[1][1]]))
        assert line["n_best"][0]["score"] == pytest.approx(best[0])
        assert line["n_best"][0]["text"] == best[1]
        assert line["null_score"] == pytest.approx(null)
        assert line["text"] == ("" if null > best[0] else best[1])


def test_a_threshold_moves_answers_to_none_and_version_1_always_answers(folder):
    examples = SQUAD2.examples(folder / "long.json", Config()).rows
    for task, threshold, empty in ((SQUAD2, -1e9, 1.0), (SQUAD2, 1e9, 0.0), (SQUAD1, -1e9, 0.0)):
        encoded = windows_of(folder, examples, task, null_threshold=threshold)
        samples = encoded.samples(LENGTH)
        lines = encoded.lines(logits_for(encoded, samples, np.random.default_rng(1)))
        assert np.mean([line["text"] == "" for line in lines]) == empty


def test_scores_are_the_official_script_s(folder):
    context = "a cat"
    for text, right, exact, f1 in OFFICIAL:
        example = Question("q", "who?", context, tuple((one, 0) for one in right))
        encoded = windows_of(folder, [example])
        encoded.lines = lambda values, text=text: [{"text": text}]
        found = encoded.scores(np.zeros(0))
        assert (found["exact"], found["f1"]) == (exact, pytest.approx(f1))
        suffix = "_has_answer" if right else "_no_answer"
        assert found[f"f1{suffix}"] == found["f1"]
    unknown = windows_of(folder, [with_fields(example, answers=None)])
    unknown.lines = lambda values: [{"text": ""}]
    assert unknown.scores(np.zeros(0)) == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": [{"text": "", "answer_start": 0}]}, r"question 1 \(0a\) has an empty answer"),
        ({"answers": []}, r"\(0a\) has no answer"),
        (
            {"answers": [{"text": "paris", "answer_start": 3}]},
            r"has the answer 'paris', but its passage has ' old ' at answer_start 3",
        ),
        ({"answers": [{"text": "paris", "answer_start": -1}]}, r"has an answer with answer_start -1"),
        ({"question": " "}, r"\(0a\) is empty"),
        ({"id": 5}, "question 1 has no id"),
    ],
)
def test_bad_questions_are_counted_and_named(change, message, folder, tmp_path):
    data = json.loads((folder / "plain.json").read_text())
    data["data"][0]["paragraphs"][0]["qas"][0] |= change
    (tmp_path / "bad.json").write_text(json.dumps(data))
    examples = SQUAD1.examples(tmp_path / "bad.json", Config())
    assert len(examples.rows) == 5
    with pytest.raises(UserError, match=f"1 of 6 questions.*: .*{message}"):
        raise UserError(examples.note)


def test_what_is_wrong_with_files_and_lengths_is_said(folder, tmp_path):
    (tmp_path / "rows.json").write_text("sentence1\tlabel\n")
    with pytest.raises(UserError, match="is not one JSON object, as in SQuAD: is it the file of another task"):
        SQUAD1.examples(tmp_path / "rows.json", Config())
    (tmp_path / "list.json").write_text('{"article": "x"}')
    with pytest.raises(UserError, match='has no list "data"'):
        SQUAD1.examples(tmp_path / "list.json", Config())
    with pytest.raises(UserError, match="3 questions with is_impossible.*: use --task squad2"):
        SQUAD1.examples(folder / "long.json", Config())
    examples = SQUAD2.examples(folder / "long.json", Config()).rows
    with pytest.raises(UserError, match="sequence_length 8 is too short for the . tokens"):
        windows_of(folder, examples).samples(8)


@pytest.mark.long
def test_answers_are_learnt_written_and_carried_to_transformers_form(folder, tmp_path, capsys):
    run, out, official = tmp_path / "run", tmp_path / "answers.jsonl", tmp_path / "predictions.json"
    shape = ["--config", str(folder / "tiny.toml"), "--mesh", "2x1"]
    words = ["--task", "squad2", "--data", str(folder), "--epochs", "60", "--valid-every", "30", "--patience", "9"]
    assert main([*shape, *words, "--out", str(run)]) == 0
    best = max(e.get("valid_f1", 0.0) for e in read_metrics(run / "metrics.jsonl"))
    assert best > 0.9
    capsys.readouterr()
    files = ["--data", str(folder / "dev-v2.0.json"), "--out", str(out)]
    assert predict(["--from", str(run), *files, "--official", str(official)]) == 0
    assert f"f1 {best:.4f}" in capsys.readouterr().err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(official.read_text()) == {line["id"]: line["text"] for line in lines}
    assert convert(["--from", f"mtjax:{run}", "--to", f"hf:{tmp_path / 'hf'}"]) == 0
    assert predict(["--from", f"hf:{tmp_path / 'hf'}", *files]) == 0
    again = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["text"] for line in again] == [line["text"] for line in lines]
    assert ensemble([str(run), f"hf:{tmp_path / 'hf'}", *files]) == 0
    together = [json.loads(line) for line in out.read_text().splitlines()]
    assert together[0]["null_score"] == pytest.approx((lines[0]["null_score"] + again[0]["null_score"]) / 2)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a cat"}\n')
    assert predict(["--from", str(run), "--data", str(rows)]) == 2
    assert "is it the file of another task" in capsys.readouterr().err
