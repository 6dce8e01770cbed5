"""`mtjax evaluate` as it is typed: results, going on after an interruption, and wrong input."""

import json
import math

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.commands.evaluate import main
from mtjax.evaluate import score
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, write_folder

TEXT = "the cat and the dog went on to the end of the road and there they rested. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`hf` and `ours`, which it was converted to, and a text."""
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("evaluate")
    hf = write_folder(folder / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
    assert convert(["--from", f"hf:{hf}", "--to", f"mtjax:{folder / 'ours'}"]) == 0
    (folder / "text.txt").write_text(TEXT)
    return folder


def run(folder, *words: str, source: str = "", data: str = "text.txt", task: str = "perplexity") -> int:
    source = source or f"hf:{folder / 'hf'}"
    return main(["--task", task, "--data", str(folder / data), "--from", source, "--overlap", "4", *words])


def test_every_place_and_mesh_gives_the_same(folder, tmp_path, capsys) -> None:
    found = {}
    for source, mesh in ((f"hf:{folder / 'hf'}", "1x1"), (str(folder / "ours"), "2x4")):
        out = tmp_path / f"{mesh}.json"
        assert run(folder, "--mesh", mesh, "--out", str(out), source=source) == 0
        facts = json.loads(out.read_text())
        assert facts["mesh"] == mesh
        found[mesh] = facts["results"]
    assert f"perplexity     {found['2x4']['perplexity']:,.4f}" in capsys.readouterr().out
    assert found["1x1"].pop("perplexity") == pytest.approx(found["2x4"].pop("perplexity"), rel=1e-6)
    assert found["1x1"].pop("loss") == pytest.approx(found["2x4"].pop("loss"), rel=1e-6)
    assert found["1x1"].pop("bits_per_byte") == pytest.approx(found["2x4"].pop("bits_per_byte"), rel=1e-6)
    assert found["1x1"] == found["2x4"]
    assert found["1x1"]["bytes"] == len(TEXT)
    assert list(tmp_path.iterdir()) == [tmp_path / "1x1.json", tmp_path / "2x4.json"] or not list(tmp_path.glob(".*"))


def test_the_same_command_goes_on(folder, tmp_path, monkeypatch, capsys) -> None:
    scored = []
    real = score.Scorer.score

    def counting(self, parameters, rows):
        scored.append(len(rows))
        if len(scored) == 3:
            raise KeyboardInterrupt
        return real(self, parameters, rows)

    monkeypatch.setattr(score.Scorer, "score", counting)
    out = tmp_path / "out.json"
    assert run(folder, "--out", str(out)) == 130
    assert not out.exists()
    (kept,) = tmp_path.iterdir()
    with kept.open("a") as file:  # as if the last line was cut off
        file.write("[[5, -1")
    before, scored[:] = sum(scored[:2]), [0, 0, 0]
    assert run(folder, "--out", str(out)) == 0
    assert f"{before} rows are done already" in capsys.readouterr().out
    again = json.loads(out.read_text())["results"]
    rows = sum(scored)
    scored[:] = [0, 0, 0]
    assert run(folder) == 0
    assert sum(scored) == rows + before
    loss = float(capsys.readouterr().out.split("loss")[1].split()[0])
    assert math.isclose(again["loss"], loss, abs_tol=1e-4)
    assert np.isfinite(loss)


def test_answers_to_another_question_are_dropped(folder, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out.json"
    (tmp_path / ".out.json.partial").write_text("another\n[[0, -1000.0, true]]\n")
    assert run(folder, "--out", str(out)) == 0
    assert json.loads(out.read_text())["results"]["loss"] < 100


@pytest.mark.parametrize(
    ("words", "named", "expected"),
    [
        ([], {"data": "none.txt"}, "none.txt does not exist"),
        ([], {"data": "hf"}, "hf is a folder: name a file"),
        ([], {"task": "lambda"}, " - did you mean 'lambada'?"),
        ([], {"source": "hg:x"}, "unknown kind of weights 'hg'"),
        ([], {"source": "/nowhere"}, "/nowhere holds no mtjax weights: it does not exist"),
        (["--sequence-length", "64"], {}, "--sequence-length 64 is above the model's sequence length of 16"),
        (["--overlap", "17"], {}, "--overlap 17 is above the 16 tokens of a window"),
        (
            ["--mesh", "data=1,context=2,model=1", "--sequence-length", "14"],
            {},
            "--sequence-length 14 must be a multiple of 4",
        ),
        (["--mesh", "1x3"], {}, "num_heads 8 is not divisible by the tensor parallel degree 3"),
        (["--tokenizer", "hf:none.json"], {}, "none.json"),
        (["--out", "/proc/nothing/x.json"], {}, "can't be used"),
    ],
)
def test_wrong_input_is_one_sentence(folder, capsys, words, named, expected) -> None:
    assert run(folder, *words, **named) == 2
    said = capsys.readouterr().err.strip()
    assert expected in said
    assert said.startswith("error: ")
    assert "\n" not in said


def test_weights_without_a_tokenizer(folder, tmp_path, capsys) -> None:
    hf = write_folder(tmp_path / "bare", random_tensors(gpt2_shapes()), GPT2_CONFIG)
    assert run(folder, source=f"hf:{hf}") == 2
    assert "has no tokenizer: add --tokenizer" in capsys.readouterr().err
