"""Files of tasks: GLUE's own tables and JSON lines, bad rows, and files of other tasks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mtjax.config import Config, replace
from mtjax.errors import UserError
from mtjax.finetune.chat_encoding import EncodedSample
from mtjax.finetune.files import read_task
from mtjax.finetune.labels import classes_of, label_numbers, weights_of
from mtjax.finetune.rows import Example, FieldNames, read_examples
from mtjax.finetune.rows_read import rows_read
from mtjax.finetune.tasks.registry import TASKS
from mtjax.finetune.tasks.squad import Question

MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
MNLI = "\t".join([*MNLI.split(), "sentence1", "sentence2", "{labels}gold_label"])
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
RTE = "index\tsentence1\tsentence2\tlabel"


def mnli(number: int, label: str, dev: bool = False) -> str:
    labels = ["x"] * 5 if dev else ["x"]
    return "\t".join([*["parse"] * 8, f'premise "{number}', f"hypothesis {number}", *labels, label])


def write(folder: Path, **files: list[str]) -> None:
    for name, lines in files.items():
        (folder / name.replace("__", ".")).write_text("\n".join(lines) + "\n")


def task_rows(folder: Path, task: str, **settings):
    return read_task(replace(Config(), data=str(folder), task=task, **settings), TASKS[task])


def test_mnli_s_tables_have_two_sets_to_validate_on_and_their_label_last(tmp_path):
    write(
        tmp_path,
        train__tsv=[MNLI.format(labels="label1\t"), mnli(1, "neutral"), mnli(2, "entailment")],
        dev_matched__tsv=[MNLI.format(labels="a\tb\tc\td\te\t"), mnli(3, "contradiction", dev=True)],
        dev_mismatched__tsv=[MNLI.format(labels="a\tb\tc\td\te\t"), mnli(4, "neutral", dev=True)],
    )
    rows = task_rows(tmp_path, "mnli")
    assert rows.train == [
        Example(('premise "1', "hypothesis 1"), "neutral"),
        Example(('premise "2', "hypothesis 2"), "entailment"),
    ]
    assert [(s.suffix, e[0].label) for s, e in rows.held_out] == [("", "contradiction"), ("_mismatched", "neutral")]


def test_bad_rows_of_qqp_are_counted_and_named(tmp_path):
    good = ["1\t2\t3\tis it?\tis it so?\t1"] * 9
    bad = ["1\t2\t3\tcut off", "1\t2\t3\t\tno first\t0", "7", "8", "9"]
    write(tmp_path, train__tsv=[QQP, *good, *bad], dev__tsv=[QQP, *good])
    rows = task_rows(tmp_path, "qqp")
    assert len(rows.train) == 9
    (note,) = rows.notes
    assert note.startswith(f"5 of 14 rows of {tmp_path}/train.tsv are skipped: line 11 has 4 fields, not 6; line 12 ")
    assert "line 12 has no question1; line 13 has 1 fields, not 6; and 2 more" in note


def test_json_lines_with_other_names_and_ends_of_lines_inside(tmp_path):
    row = {"premise": "one\u2028two", "hypothesis": "three", "label": "entailment", "idx": 1}
    text = json.dumps(row, ensure_ascii=False)
    write(tmp_path, train__jsonl=[text, "", "{", "[1]", text, text], validation__jsonl=[text])
    rows = task_rows(tmp_path, "rte")
    assert [e.texts for e in rows.train] == [("one\u2028two", "three")] * 3
    assert "line 3 is not JSON; line 4 is not a JSON object" in rows.notes[0]


@pytest.mark.parametrize(
    ("task", "files", "settings", "message"),
    [
        (
            "rte",
            {"train__tsv": [QQP, "1\t2\t3\ta\tb\t1"]},
            {},
            "needs sentence1 and sentence2 or premise and hypothesis",
        ),
        ("rte", {"train__tsv": [RTE, "1\ta\tb\tentailment"]}, {}, "contains no dev.tsv or valid.tsv or validation.tsv"),
        ("rte", {"test__tsv": [RTE]}, {}, "contains no train.tsv"),
        ("rte", {"train__tsv": [RTE]}, {}, "train.tsv has no rows"),
        (
            "rte",
            {"train__tsv": [RTE, "a", "b", "1\ta\tb\tx"]},
            {},
            "2 of 3 rows .* are skipped.*the file of another task",
        ),
        ("rte", {"train__tsv": [RTE, "1\ta\tb\tc"]}, {"label_field": "x"}, "fields and labels of rte are fixed"),
        ("classify", {"train__tsv": [RTE, "1\ta\tb\tc"]}, {"text_fields": "a,b,c"}, "names 3 fields"),
        ("classify", {"train__tsv": [RTE, "1\ta\tb\tc"]}, {"label_field": "x"}, "needs x for a label"),
    ],
)
def test_what_is_wrong_with_files_is_said_in_one_sentence(task, files, settings, message, tmp_path):
    write(tmp_path, **files)
    with pytest.raises(UserError, match=message) as caught:
        task_rows(tmp_path, task, **settings)
    assert "\n" not in str(caught.value)


def test_one_file_is_shared_out_always_alike(tmp_path):
    write(tmp_path, rows__tsv=["text\tlabel", *(f"text {i}\t{i % 2}" for i in range(20))])
    found = [task_rows(tmp_path / "rows.tsv", "classify", split="80,20,0") for _ in range(2)]
    assert found[0] == found[1]
    parts = [found[0].train, found[0].held_out[0][1]]
    assert [len(part) for part in parts] == [16, 4]
    assert {e.texts[0] for part in parts for e in part} == {f"text {i}" for i in range(20)}


def test_labels_become_numbers_and_others_are_left_out(tmp_path):
    examples = [Example(("t",), label) for label in ("10", "9", "10", "9")]
    labels = classes_of(examples)
    assert labels == ("9", "10")
    good, numbers, note = label_numbers([*examples, Example(("t",), "x")], labels, "training")
    assert (len(good), numbers.tolist(), numbers.dtype) == (4, [1, 0, 1, 0], np.int32)
    assert note == "1 of 5 training rows are skipped: labels such as 'x' are not among 9, 10"
    _, numbers, note = label_numbers([*examples, Example(("t",), "nan")], None, "training")
    assert (numbers.tolist(), numbers.dtype, note.endswith("'nan' are not numbers")) == (
        [10, 9, 10, 9],
        np.float32,
        True,
    )
    with pytest.raises(UserError, match="is it the file of another task"):
        label_numbers(examples, ("x", "y"), "dev")
    with pytest.raises(UserError, match="4 different labels .*: these are not classes"):
        classes_of([Example(("t",), str(i)) for i in range(4)])
    assert classes_of([Example(("t",), label) for label in ("5", "--5")]) == ("--5", "5")  # not all are integers


def test_weights_of_classes():
    numbers = np.array([0, 0, 0, 1])

    def weights(text: str) -> list[float]:
        settings = {"class_weights": text, "labels": ("no", "yes"), "head": "classification"}
        return weights_of(replace(Config(), **settings), numbers).tolist()

    assert weights("balanced") == pytest.approx([4 / 6] * 3 + [2.0])  # as scikit-learn's: n / (classes * count)
    assert weights("yes=3") == [1, 1, 1, 3]
    for text, message in (("yess=3", "did you mean 'yes'"), ("yes=-1", "0 or more"), ("yes=0,no=0", "weight 0")):
        with pytest.raises(UserError, match=message):
            weights(text)


def test_rows_that_processes_have_read_are_compared_by_all_of_their_content():
    """Also a passage that a question does not show, and the middle of a long conversation."""
    config = replace(Config(), train_data="a/train.json", valid_data="dev.json")
    question = Question("7", "Who?", "The passage.", ())
    tokens = np.arange(5000, dtype=np.int32)
    chat = EncodedSample(tokens, tokens > 100)
    rows = [Example(("a",), "x"), question, chat]
    (own,), (dev,) = rows_read(config, rows, rows[:1]).values()
    assert (own.name, own.documents, dev.name, dev.documents) == ("a/train.json", 3, "dev.json", 1)
    (copy,), _ = rows_read(replace(config, train_data="/mnt/train.json"), list(rows), rows[:1]).values()
    assert copy.is_same(own)
    others = [
        [Example(("a",), "y"), question, chat],
        [rows[0], dataclasses.replace(question, context="The passage!"), chat],
        [rows[0], question, EncodedSample(np.where(tokens == 2500, 7, tokens), chat.trained)],
        [question, rows[0], chat],
    ]
    for other in others:
        assert not rows_read(config, other, [])["training rows"][0].is_same(own)


def test_labels_need_not_be_there(tmp_path):
    write(tmp_path, rows__tsv=["id\ttext", "1\tsome text"])
    found = read_examples(tmp_path / "rows.tsv", FieldNames((("text",),), ("label",)), labelled=False)
    assert found.rows == [Example(("some text",), None)]
