"""Scores of texts by any program: selected rows, and continuations of prompts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mtjax.cli import main
from mtjax.commands.select import Options, selected
from mtjax.errors import UserError
from mtjax.evaluate.continuations import summary
from mtjax.finetune.scorer import open_scorer
from tests.convert.hf_folders import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder

LENGTHS = "import sys, json\nfor line in sys.stdin: print(json.dumps({'score': len(json.loads(line)['text'])}))"


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """A program whose scores are the texts' lengths."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    return f"command:{sys.executable} {tmp_path / 'lengths.py'}"


def select(capsys, *arguments: object) -> tuple[int, str]:
    code = main(["data", "select", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out + output.err


def test_rows_are_kept_by_score(lengths: str, tmp_path: Path, capsys) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "kept.jsonl"
    texts = ["ccc", "a", "dd\n", "b", "日本語 x"]
    source.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)) + "\n")
    code, said = select(capsys, "--input", source, "--output", out, "--scorer", lengths, "--lowest", 0.6)
    assert code == 0 and "kept    3 rows, scores 1 to 3, mean 1.66667" in said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    # In their order; of three texts with three characters the first one.
    assert rows == [{"text": t, "id": i, "score": len(t)} for i, t in enumerate(texts) if i in (0, 1, 3)]
    # The written scores are read.
    code, _ = select(capsys, "--input", out, "--output", out, "--at-least", 3, "--overwrite")
    assert code == 0 and [json.loads(line)["id"] for line in out.read_text().splitlines()] == [0]


def test_shares_of_random_scores() -> None:
    scores = np.random.default_rng(0).integers(0, 20, 101).astype(float)
    for share in (0.01, 0.3, 1.0):
        for name, sign in (("lowest", 1), ("highest", -1)):
            options = Options(Path(), Path(), **{name: share})
            ranked = sorted(range(101), key=lambda i: (sign * scores[i], i))
            assert selected(scores, options).tolist() == sorted(ranked[: round(share * 101)])
    between = selected(scores, Options(Path(), Path(), at_least=5, at_most=7))
    assert between.tolist() == [i for i, score in enumerate(scores) if 5 <= score <= 7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lowest", "1.5"], "--lowest is 1.5, and must be above 0 and at most 1"),
        ([], "nothing says which rows to keep"),
        (["--lowest", "0.5", "--at-most", "1"], "--lowest and --at-most exclude each other"),
        (["--at-most", "1", "--score-label", "x"], "--score-label needs --scorer"),
        (["--at-most", "-1"], "no row has such a score: they are from 0 to 2"),
        (["--at-most", "1", "--score-key", "other"], 'rows.jsonl:1 must be an object with a finite number "other"'),
        (["--at-most", "1", "--scorer", "command:false"], "ended with exit code 1"),
        (["--at-most", "1", "--scorer", "command:echo {}"], "wrote 1 lines for 3 texts"),
        (["--at-most", "1", "--scorer", "command:no-such-program"], "can't be run"),
        (["--at-most", "1", "--scorer", "command:cat"], 'must be an object with a finite number "score"'),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": "x", "score": n}) + "\n" for n in range(3)))
    code, said = select(capsys, "--input", source, "--output", tmp_path / "out", *arguments)
    assert code == 2 and message in said and not (tmp_path / "out").exists(), said


def test_a_program_has_no_classes(lengths: str) -> None:
    with pytest.raises(UserError, match="--score-label needs a classifier"):
        open_scorer(lengths, "toxic")
    assert open_scorer(lengths)(["", "ab"]) == [0, 2]


def test_summary_of_continuations() -> None:
    scores = np.array([[0.1, 0.6], [0.5, 0.2], [0.3, 0.4]])
    found = summary(scores, np.array([0.9, 0.1, 0.2]), 0.5)
    assert found["expected_maximum"] == pytest.approx(0.5) and found["share_above"] == pytest.approx(2 / 3)
    assert found["mean"] == pytest.approx(0.35) and found["mean_of_prompts_above"] == pytest.approx(0.35)
    assert found["expected_maximum_of_prompts_below"] == pytest.approx(0.45)
    assert found["share_above_of_prompts_below"] == 0.5
    assert not any(name.endswith("_above") and "of" in name for name in summary(scores, np.zeros(3), 0.5))


@pytest.mark.long
def test_continuations_of_prompts(lengths: str, tmp_path: Path, capsys) -> None:
    """The texts are those of `mtjax generate` with the same seeds, and so are bulk texts without prompts repeatable."""
    pytest.importorskip("safetensors", reason="needs the extra convert")
    model = f"hf:{write_folder(tmp_path / 'hf', random_tensors(llama_shapes()), LLAMA_CONFIG, tokenizer=True)}"
    prompts, out, texts = tmp_path / "prompts.jsonl", tmp_path / "out.json", tmp_path / "texts.jsonl"
    prompts.write_text('{"prompt": {"text": "the cat"}}\n{"prompt": "a dog"}\n')
    how = ["--max-tokens", "5", "--temperature", "1", "--top-p", "0.9"]
    given = ["--task", "continuations", "--from", model, "--data", str(prompts), "--scorer", lengths, *how]
    assert main(["evaluate", *given, "--samples", "3", "--threshold", "8", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "the cat"}\n{"prompt": "a dog"}\n')
    sampling = ["--samples", "3", *how]
    assert main(["generate", "--from", model, "--input", str(plain), "--output", str(texts), *sampling]) == 0
    rows = [json.loads(line) for line in texts.read_text().splitlines()]
    expected = {(row["index"], row["sample"]): row["text"] for row in rows}
    assert {(i, j): text for i, row in enumerate(found["rows"]) for j, text in enumerate(row["texts"])} == expected
    largest = [max(len(text) for text in row["texts"]) for row in found["rows"]]
    assert found["results"]["expected_maximum"] == np.mean(largest)
    assert [row["prompt_score"] for row in found["rows"]] == [7, 5]
    documents = ["generate", "--from", model, *how, "--output", str(tmp_path / "documents.jsonl"), "--documents"]
    assert main([*documents, "2"]) == 0 and main([*documents, "3"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == [0, 1, 2] and len({row["text"] for row in rows}) == 3
    capsys.readouterr()
    for wrong, message in (
        (["--samples", "2", "--task", "perplexity"], "--samples has no effect without --task continuations"),
        (["--task", "continuations", "--overlap", "3"], "--overlap has no effect without another --task"),
        (["--task", "continuations"], "--scorer is missing"),
    ):
        assert main(["evaluate", "--from", model, "--data", str(prompts), *wrong]) == 2
        assert message in capsys.readouterr().err
