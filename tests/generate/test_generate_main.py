"""The command `mtjax generate`: sources of prompts, outputs, and error messages."""

import io
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.cli import main
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.show import COLORS, color
from tests.convert.hf_folders import GPT2_CONFIG, HIDDEN, gpt2_shapes, random_tensors, write_folder

pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

CONTEXT = 96
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Builds a GPT-2 with random weights whose texts have no stop token."""
    assert len(jax.devices()) >= 4  # in use: their number is fixed
    shapes = gpt2_shapes() | {"transformer.wpe.weight": (CONTEXT, HIDDEN)}
    config = GPT2_CONFIG | {"n_positions": CONTEXT}
    return write_folder(tmp_path_factory.mktemp("hf") / "gpt2", random_tensors(shapes), config, tokenizer=True)


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
    """Commands share the programs of a model on a mesh: each would trace and compile its own in a second."""
    first: dict[Any, GenerationPrograms] = {}

    class Sharing(GenerationPrograms):
        def __init__(self, sharded_model, parameters, start_id, **options) -> None:
            super().__init__(sharded_model, parameters, start_id, **options)
            like = first.setdefault((sharded_model.config, sharded_model.mesh_shape, start_id, *options.items()), self)
            programs = [name for name in vars(GenerationPrograms) if name.startswith("_compiled_")]
            self.__dict__.update({name: getattr(like, name) for name in programs})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtjax.generate.command.GenerationPrograms", Sharing)
        yield


def generate(capsys, folder: Path, *arguments: str) -> str:
    code = main(["generate", "--from", f"hf:{folder}", "--max-tokens", "6", "--ignore-eos", *arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def refused(capsys, *arguments: str) -> str:
    assert main(["generate", *arguments]) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("error: ") and output.err.count("\n") == 1
    return output.err


def test_prompts_from_arguments_input_and_files(folder, tmp_path, capsys, monkeypatch) -> None:
    one = generate(capsys, folder, "the cat")
    assert one.endswith("\n") and len(one) > 1
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat"))
    assert generate(capsys, folder) == one
    assert generate(capsys, folder, "--mesh", "1x2", "--echo", "the cat") == f"the cat{one}"
    cut = one[1:3]
    assert generate(capsys, folder, "--stop", "never", "--stop", cut, "the cat") == one[: one.index(cut)] + "\n"
    several = generate(capsys, folder, "--temperature", "1", "--samples", "2", "the cat", "the dog")
    assert [line for line in several.splitlines() if line.startswith("---")] == [
        "--- 'the cat' (1)",
        "--- 'the cat' (2)",
        "--- 'the dog' (1)",
        "--- 'the dog' (2)",
    ]
    rows = [line.split("\t") for line in generate(capsys, folder, "--show-logprobs", "the cat").splitlines()]
    numbers = [float(number) for number, _ in rows if number]
    assert len(numbers) == 6 and max(numbers) < 0

    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    lines = [{"prompt": "the cat"}, {"prompt": "the dog", "max_tokens": 2}, {"prompt": "road", "temperature": 1.0}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--input", str(source), "--output", str(target), "--batch", "4")
    generate(capsys, folder, *files, "--logprobs")
    texts = sorted(map(json.loads, target.read_text().splitlines()), key=lambda text: text["index"])
    assert [text["index"] for text in texts] == [0, 1, 2] and texts[0]["text"] == one[:-1]
    assert [len(text["logprobs"]) for text in texts] == [6, 2, 6]
    assert {text["finish_reason"] for text in texts} == {"length"}
    # Truncated: complete lines are retained, and only the others are generated again.
    first, *_ = lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(first + lines[1][:20])
    generate(capsys, folder, *files, "--logprobs")
    again = target.read_bytes().splitlines(keepends=True)
    assert again[0] == first and sorted(again) == sorted(lines)


def test_output_of_other_weights_or_settings_is_rejected(folder, tmp_path, capsys) -> None:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    prompts = [{"prompt": "the cat"}, {"prompt": "the dog", "max_tokens": 2}]

    def read(*lines: dict) -> None:
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    read(*prompts)
    files = ("--input", str(source), "--output", str(target))
    settings = ("--max-tokens", "6", "--ignore-eos", *files)
    generate(capsys, folder, *files)
    made, record = target.read_bytes(), tmp_path / "texts.jsonl.settings.json"
    assert {row["index"]: row.get("settings") for row in map(json.loads, made.splitlines())} == {
        0: None,
        1: {"max_tokens": 2},
    }
    assert json.loads(record.read_text())["max_tokens"] == 6

    def refused_with(*arguments: str, source: Path = folder) -> str:
        assert main(["generate", "--from", f"hf:{source}", *settings, *arguments]) == 2
        output = capsys.readouterr().err.splitlines()[-1]
        assert output.startswith("error: ") and "--overwrite" in output and target.read_bytes() == made
        return output

    (folder / "notes.jsonl").write_text("none of the weights\n")
    generate(capsys, folder, *files, "--mesh", "1x2", "--batch", "2")  # all is there
    assert target.read_bytes() == made
    (folder / "notes.jsonl").unlink()
    output = refused_with("--temperature", "0.5", "--seed", "3", "--stop", "a", "--logprobs")
    assert (
        "texts.jsonl was generated with stop none, logprobs false, temperature 0.0, seed 0, and this command has"
        in output
    )
    assert 'stop ["a"], logprobs true, temperature 0.5, seed 3: name another --output' in output
    assert "max_tokens 6, and this command has max_tokens 7" in refused_with("--max-tokens", "7")
    assert "was generated with beams none, and this command has beams 2" in refused_with("--beams", "2")
    tensors = {name: 2 * tensor for name, tensor in random_tensors(gpt2_shapes()).items()}
    tensors |= {"transformer.wpe.weight": np.zeros((CONTEXT, HIDDEN), np.float32)}
    other = write_folder(tmp_path / "other", tensors, GPT2_CONFIG | {"n_positions": CONTEXT}, tokenizer=True)
    output = refused_with(source=other)
    assert f"was generated with weights hf:{folder} (" in output and f"this command has weights hf:{other} (" in output
    for lines, message in (
        ([prompts[0], {"prompt": "the road"}], "a text for the prompt 'the dog', and"),
        ([prompts[0], {"prompt": "the dog"}], 'that was generated with {"max_tokens": 2}, and the line has {}'),
        (prompts[:1], f"a text for {source}:2, which has no prompt"),
    ):
        read(*lines)
        assert message in refused_with()
    read(*prompts)
    generate(capsys, folder, *files, "--samples", "2")  # more texts of the same
    two, made = made, target.read_bytes()
    assert made.startswith(two) and len(made.splitlines()) == 4
    assert "--samples is 1: give at least 2" in refused_with()
    record.unlink()
    assert "the record texts.jsonl.settings.json is missing" in refused_with("--samples", "2")
    generate(capsys, folder, *files, "--overwrite")
    assert target.read_bytes() == two and record.is_file()
    assert main(["generate", "--from", f"hf:{folder}", *files[:3], str(source), "--overwrite"]) == 2
    assert "is the same file as --input: name another file" in capsys.readouterr().err and source.read_text()
    assert "--overwrite requires --output" in refused(capsys, "--from", "x", "--overwrite", "y")


@pytest.mark.long
def test_every_prompt_uses_its_own_seed(folder, tmp_path, capsys, monkeypatch) -> None:
    draws = ("--temperature", "1", "--seed", "5")
    step = 0x9E3779B97F4A7C15
    seeds = [[5 + prompt * step + sample for sample in range(2)] for prompt in range(3)]
    expected = [
        generate(capsys, folder, "--temperature", "1", "--seed", str(seed % 2**64), "the cat")[:-1]
        for several in seeds
        for seed in several
    ]
    assert len(set(expected)) == 6
    shown = generate(capsys, folder, *draws, "--samples", "2", "the cat", "the cat", "the cat")
    titles = [f"--- 'the cat' ({sample})\n" for sample in (1, 2)] * 3
    assert shown == "".join(f"{title}{text}\n" for title, text in zip(titles, expected, strict=True))
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    lines = ['{"prompt": "the cat"}', '{"prompt": "the cat"}', '{"prompt": "the cat", "seed": 5}']
    source.write_text("\n".join(lines))
    generate(capsys, folder, *draws, "--input", str(source), "--output", str(target))
    texts = sorted(map(json.loads, target.read_text().splitlines()), key=lambda text: text["index"])
    assert [text["text"] for text in texts] == [expected[0], expected[2], expected[0]]
    # In a conversation, too.
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\nthe cat\n"))
    assert generate(capsys, folder, *draws, "--interactive") == f"{expected[0]}\n{expected[2]}\n"


def test_beams_are_printed_and_written(folder, tmp_path, capsys) -> None:
    shown = generate(capsys, folder, "--beams", "3", "--samples", "2", "the cat").splitlines()
    assert [line.split("(")[0] for line in shown[::2]] == ["--- 'the cat' "] * 2
    scores = [float(line.split(", ")[1][:-1]) for line in shown[::2]]
    assert scores == sorted(scores, reverse=True) and shown[1] != shown[3]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text('{"prompt": "the cat"}\n')
    files = ("--input", str(source), "--output", str(target), "--beams", "3", "--samples", "2")
    generate(capsys, folder, *files)
    texts = [json.loads(line) for line in target.read_text().splitlines()]
    assert [text["text"] for text in texts] == shown[1::2]
    assert [round(text["score"], 4) for text in texts] == scores
    assert {text["finish_reason"] for text in texts} == {"length"}
    source.write_text('{"prompt": "the cat", "top_k": 3}\n')
    target.unlink()
    assert main(["generate", "--from", f"hf:{folder}", *files]) == 2
    assert f"{source}:1: --beams (beam search) supports max_tokens only" in capsys.readouterr().err
    few = ("--from", f"hf:{folder}", "--beams", "2")
    assert "at least as many beams" in refused(capsys, *few, "--samples", "3", "x")
    # Before the weights are looked at, and before they are read.
    nowhere = ("--from", "hf:/nowhere", "--state-snapshots", "3", "x")
    assert "does not support --state-snapshots" in refused(capsys, *nowhere, "--beams", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtjax.convert.saved_model.SavedModel.parameters", None)
        assert "a gpt has none: remove it" in refused(capsys, *few[:2], "--state-snapshots", "3", "x")
    assert "does not support --stop" in refused(capsys, *few, "--stop", "a", "x")
    assert "--length-penalty requires --beams" in refused(
        capsys, "--from", f"hf:{folder}", "--length-penalty", "2", "x"
    )


@pytest.mark.long  # `mtjax evaluate` reads a converted folder in make test
def test_all_weight_formats_generate_the_same_text(folder, tmp_path, capsys) -> None:
    places = {"mtjax": ["--vocab-multiple", "256"], "megatron": ["--tensor", "2"]}
    kinds = [kind for kind in places if kind != "megatron" or find_spec("torch")]
    for kind in kinds:
        assert main(["convert", "--from", f"hf:{folder}", "--to", f"{kind}:{tmp_path / kind}", *places[kind]]) == 0
    capsys.readouterr()
    settings = ["--max-tokens", "6", "--ignore-eos", "the cat"]
    expected = generate(capsys, folder, "the cat")
    tokenizer = ["--tokenizer", str(folder / "tokenizer.json")]
    for kind, place in (("mtjax", tmp_path / "mtjax"), ("megatron", f"megatron:{tmp_path / 'megatron'}")):
        if kind in kinds:
            arguments = [] if kind == "mtjax" else tokenizer
            assert main(["generate", "--from", str(place), "--mesh", "1x2", *arguments, *settings]) == 0
            assert capsys.readouterr().out == expected


def test_chat_with_template(folder, capsys, monkeypatch, tmp_path) -> None:
    settings = folder / "tokenizer_config.json"
    plain = settings.read_text()
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n\nthe dog\n"))
    try:
        settings.write_text(json.dumps({"chat_template": TEMPLATE}))
        answers = generate(capsys, folder, "--interactive", "--system", "road")
    finally:
        settings.write_text(plain)
    written = "system road\nuser the cat\na"
    assert answers.startswith(generate(capsys, folder, written))
    assert len(answers) > len(generate(capsys, folder, written))


def test_what_is_wrong_is_said(folder, tmp_path, capsys) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": 3}\n')
    files = ("--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    assert "top_p is 0.0" in refused(capsys, "--from", str(folder), "--top-p", "0", "x")
    assert "require each other" in refused(capsys, "--from", str(folder), "--input", str(source))
    assert "mutually exclusive" in refused(capsys, "--from", str(folder), *files, "x")
    assert f"use --from hf:{folder}" in refused(capsys, "--from", str(folder), "x")
    assert "does not exist" in refused(capsys, "--from", str(tmp_path / "none"), "x")
    assert "no effect" in refused(capsys, "--from", f"hf:{folder}", "--interactive", "--echo")


@pytest.mark.parametrize("text", ["not JSON", '{"prompt": 3}', '{"prompt": "a", "top_p": 7}', '{"prompt": ""}'])
def test_error_names_the_invalid_line(folder, tmp_path, capsys, text: str) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(text + "\n")
    files = ("--input", str(source), "--output", str(tmp_path / "out.jsonl"))
    assert main(["generate", "--from", f"hf:{folder}", *files]) == 2
    assert f"{source}:1" in capsys.readouterr().err


def test_colors_are_steps_of_probability() -> None:
    assert [color(np.log(p)) for p in (1e-9, 0.5, 1.0)] == [COLORS[0], COLORS[4], COLORS[-1]]
