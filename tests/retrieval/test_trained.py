"""A Retro from `mtjax train` to its evaluation with and without neighbours, and to other formats."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.cli import main as data
from mtjax.commands.convert import main as convert
from mtjax.commands.evaluate import main as evaluate
from mtjax.commands.generate import main as generate
from mtjax.commands.train import main as train
from mtjax.config import Parallel
from mtjax.config.model_identity import differences
from mtjax.convert.megatron_retro_arguments import retro_settings
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.errors import UserError
from mtjax.evaluate.neighbours import Text
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.sharding.param_specs import dotted
from tests.retrieval.tiny_encoder import write_corpus, write_encoder
from tests.tiny import mesh_of

LENGTH, CHUNK, VALID = 32, 8, 8
SETTINGS = {
    "family": "retro",
    "num_layers": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "retro_chunk": CHUNK,
    "retro_first": 2,
    "retro_every": 1,
    "retro_encoder_layers": 1,
    "retro_encoder_dropout": 0.05,
    "vocab_multiple": 128,
    "sequence_length": LENGTH,
    "steps": 3,
    "warmup_steps": 0,
    "learning_rate": 0.01,
    "global_batch_size": 4,
    "valid_every": 3,
    "valid_batches": 2,
    "split": "70,30,0",
    "compute_dtype": "float32",
}


def words(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus`, its neighbours `near`, and `run`, trained with them on two devices."""
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("retro")
    write_corpus(folder, 60)
    embedder = ["--embedder", f"hf:{write_encoder(folder / 'bert')}", "--embedder-tokens", "40"]
    embed = ["embed", "--input", str(folder / "corpus"), "--chunk", str(CHUNK), "--rows", "16"]
    assert data(["data", *embed, *embedder]) == 0
    own = words(data=folder / "corpus", neighbours=folder / "near", **SETTINGS)
    assert data(["data", "neighbours", *own, *embedder, "--nearest", "2"]) == 0
    assert train([*own, "--out", str(folder / "run"), "--mesh", "2x1", "--zero", "1"]) == 0
    return folder


def results(folder: Path, neighbours: str, mesh: str = "1x1") -> dict[str, float]:
    out = folder / f"{Path(neighbours).name}-{mesh}.json"
    options = words(task="perplexity", neighbours=neighbours, mesh=mesh, out=out, rows=3)
    assert evaluate(["--from", str(folder / "run"), *options]) == 0
    return json.loads(out.read_text())["results"]


def test_perplexity_with_neighbours_is_that_of_training_and_others_differ(folder: Path) -> None:
    """Of the same validation samples, on another mesh."""
    own, none = results(folder, str(folder / "near"), "1x2"), results(folder, "none")
    shuffled = results(folder, "shuffled")
    logged = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    [valid] = [line["valid_loss"] for line in logged if "valid_loss" in line]
    assert own["loss"] == pytest.approx(valid, rel=1e-5)
    assert own["perplexity"] == pytest.approx(math.exp(own["loss"]), rel=1e-6)
    assert len({own["loss"], none["loss"], shuffled["loss"]}) == 3
    # Tokens before the end of the first chunk read nothing.
    assert own["tokens"] == VALID * LENGTH and own["read: tokens"] == VALID * (LENGTH - CHUNK + 1)
    bins = [name for name in own if name.startswith("shared") and name.endswith("tokens")]
    assert bins == ["shared too short: tokens"]  # chunks of 8 have no 13-gram
    assert own[bins[0]] == own["read: tokens"]
    assert own["read: perplexity without"] == pytest.approx(none["read: perplexity"], rel=1e-5)
    gain = math.log(none["read: perplexity"] / own["read: perplexity"])
    assert own["read: gain"] == pytest.approx(gain, abs=1e-5)


def test_tokens_are_counted_by_what_their_neighbours_share() -> None:
    near = [[np.arange(99, 131)] * 2, [np.arange(99, 131), np.arange(31, 63)], [np.arange(32, 64)] * 2]
    dataset: Any = [{"labels": np.arange(48), "neighbours": near}]
    [bins] = Text(dataset, 1, 16).bins()
    assert bins.tolist() == [-1] * 15 + [0] * 16 + [3] * 16 + [4]  # one token is left: too short


def test_the_decoder_alone_is_a_gpt(folder: Path) -> None:
    """Its loss is the Retro's without neighbours."""
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"mtjax:{folder / 'gpt'}", "--without-encoder"]) == 0
    retro, gpt = (MtjaxSource(folder / name) for name in ("run", "gpt"))
    assert gpt.origin.config.model.family == "gpt" and gpt.origin.config.data.neighbours is None
    for ours, stacks in (
        ("mlp.up.weight", ("plain", "first_rest", "retro")),
        ("attention.qkv.bias", ("plain", "first_attention", "retro")),
    ):
        found = list(gpt.slices(gpt.parameters[f"stack.layers.{ours}"]))
        wanted = [next(iter(retro.slices(retro.parameters[f"{stack}.layers.{ours}"]))) for stack in stacks]
        np.testing.assert_array_equal(found, wanted)
    own, theirs = (next(iter(source.slices(source.parameters["final_norm.scale"]))) for source in (gpt, retro))
    np.testing.assert_array_equal(own, theirs)


def test_a_gpt_becomes_the_decoder_of_a_new_retro(folder: Path, capsys: Any) -> None:
    """What a GPT has is kept to the bit, and the rest is what a run with this seed would draw."""
    gpt, back = folder / "a-gpt", folder / "from-gpt"
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"mtjax:{gpt}", "--without-encoder"]) == 0
    file = folder / "retro.toml"
    wrong = {"num_layers = 4": "num_layers 4, and the weights of the gpt have 3", 'family = "bert"': "the family bert"}
    for line, message in wrong.items():
        file.write_text(f"[model]\n{line}\n")
        assert convert(["--from", f"mtjax:{gpt}", "--to", f"mtjax:{back}", "--with-encoder", str(file)]) == 2
        assert message in capsys.readouterr().err
    names = ("retro_chunk", "retro_first", "retro_every", "retro_encoder_layers", "retro_encoder_dropout")
    lines = [f"{name} = {SETTINGS[name]}" for name in names]
    file.write_text("\n".join(["[model]", *lines, "[training]", "seed = 7"]))
    assert convert(["--from", f"mtjax:{gpt}", "--to", f"mtjax:{back}", "--with-encoder", str(file)]) == 0
    assert "are drawn with seed 7" in capsys.readouterr().out
    found, known = MtjaxSource(back), MtjaxSource(folder / "run")
    assert not differences(found.origin.config.model, known.origin.config.model)
    drawn = ShardedModel(dataclasses.replace(known.origin.config, parallel=Parallel()), mesh_of("1x1"))
    drawn = {dotted(path): array for path, array in jax.tree_util.tree_leaves_with_path(drawn.initialize_parameters(7))}
    for name, parameter in found.parameters.items():
        kept = list(known.slices(known.parameters[name]))
        is_new = "chunked" in name or name.startswith(("encoder", "first_norm"))
        wanted = drawn[name] if is_new and parameter.num_layers else [drawn[name]] if is_new else kept
        np.testing.assert_array_equal(list(found.slices(parameter)), wanted, err_msg=name)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_megatrons_format_holds_the_same_weights(folder: Path, impl: str, capsys: Any) -> None:
    pytest.importorskip("torch", reason="needs the extra megatron: pip install '.[megatron]'")
    theirs, back = folder / f"megatron-{impl}", folder / f"back-{impl}"
    options = ["--tensor", "2", "--transformer-impl", impl]
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"megatron:{theirs}", *options]) == 0
    note = (
        "0.15 has no final norm (retro_final_norm true) and reads neighbours in the layers 6, not 2, 3 (retro_first, "
    )
    assert note in capsys.readouterr().out
    assert convert(["--from", f"megatron:{theirs}", "--to", f"mtjax:{back}", "--vocab-multiple", "128"]) == 0
    found, known = (find_weights(at).metadata["fingerprints"] for at in (back, folder / "run"))
    names = [name for name in found if name != "parameters.embedding"]  # its rows of padding are not converted
    assert len(names) == 75 and all(found[name] == known[name] for name in names)
    models = [MtjaxSource(at).origin.config.model for at in (back, folder / "run")]
    names = ("retro_first", "retro_every", "retro_chunk", "retro_encoder_layers", "retro_encoder_dropout")
    assert len({tuple(getattr(model, name) for name in names) for model in models}) == 1


def test_megatrons_dropout_of_the_encoder_is_one_number() -> None:
    names = ("decoder.layers.1.cross_attention.encoder.layers.0.x", "decoder.layers.1.cross_attention.attn.x")
    arguments = {"num_layers": 2, "retro_encoder_hidden_dropout": 0.0, "retro_encoder_attention_dropout": 0.0}
    assert retro_settings(arguments, names)["retro_encoder_dropout"] == 0.0
    assert retro_settings({"num_layers": 2}, names)["retro_encoder_dropout"] == 0.1
    with pytest.raises(UserError, match="retro_encoder_hidden_dropout is 0.2 and retro_encoder_attention_dropout 0.0"):
        retro_settings(arguments | {"retro_encoder_hidden_dropout": 0.2}, names)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (evaluate, "--task perplexity --data {0}/corpus", "a retro reads neighbours, which this text does not have"),
        (evaluate, "--task perplexity --neighbours none --data x", "--data x has no effect with --neighbours"),
        (evaluate, "--task lambada --neighbours none", "--neighbours none has no effect without --task perplexity"),
        (evaluate, "--task perplexity --neighbours {0}/absent", "{0}/absent.valid.json does not exist"),
        (generate, "--interactive", "a retro runs the whole model for each token and does not support --interactive"),
        (convert, "--to hf:{0}/hf", "transformers has no Retro: write its decoder as a gpt with --without-encoder"),
        (convert, "--to megatron:{0}/m --pipeline 3", "--pipeline 3 does not support a retro, which has no stages"),
        (convert, "--to megatron:{0}/m --ckpt-format torch_dist", "a retro is written in the format torch only"),
        (convert, "--to megatron:{0}/m --transformer-impl legacy", "not support family retro"),
    ],
)
def test_wrong_input_is_one_sentence(folder: Path, command: Any, options: str, message: str, capsys: Any) -> None:
    assert command(["--from", str(folder / "run"), *options.format(folder).split()]) == 2
    error = capsys.readouterr().err
    assert message.format(folder) in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "1x2x1", "microbatch_size": 2}, "pipeline parallelism (stage=2 in mesh"),
        ({"mesh": "data=1,context=2,model=1"}, "context parallelism (context=2 in mesh"),
        ({"reset_attention_mask": "true"}, "reset_attention_mask does not support the family retro"),
        ({"retro_first": 4}, "retro_first is 4, and num_layers is 3"),
        ({"retro_chunk": 5}, "sequence_length 32 is not a multiple of retro_chunk 5"),
        ({"retro_retrieved_chunks": 5}, "a neighbour has 40 tokens"),
        ({"num_experts": 2}, "num_experts"),
    ],
)
def test_settings_that_do_not_go_along_are_refused(folder: Path, settings: dict, message: str, capsys: Any) -> None:
    own = words(data=folder / "corpus", neighbours=folder / "near", **(SETTINGS | settings), out=folder / "refused")
    assert train([word for word in own if word != "true"]) == 2
    assert message in capsys.readouterr().err


def test_texts_with_neighbours_of_their_lines(folder: Path, capsys: Any) -> None:
    rows = [
        {"prompt": "the river and one stone", "passages": ["two light"], "max_tokens": 3},
        {"prompt": "the river and one stone", "neighbours": [["two light", "over"]], "seed": 3},
        {"prompt": "the river"},
        {"prompt": "the river", "passages": "two light"},
    ]
    lines, out = folder / "prompts.jsonl", folder / "answers.jsonl"

    def written(count: int, *more: str) -> tuple[int, list[dict]]:
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        code = generate(["--from", str(folder / "run"), "--input", str(lines), "--output", str(out), *more])
        return code, [json.loads(line) for line in out.read_text().splitlines()]

    code, first = written(1, "--max-tokens", "5", "--ignore-eos")
    assert code == 0
    code, found = written(3, "--max-tokens", "5", "--ignore-eos")
    assert code == 0 and found[:1] == first  # what was there is kept
    assert [each["finish_reason"] for each in found] == ["length"] * 3
    assert [each.get("settings", {}) for each in found] == [
        {key: value for key, value in row.items() if key != "prompt"} for row in rows[:3]
    ]
    rows[0]["passages"] = ["another"]
    capsys.readouterr()
    assert written(3, "--max-tokens", "5", "--ignore-eos") == (2, found)
    assert '"passages": ["another"]' in capsys.readouterr().err.replace("\\", "")
    rows[0]["passages"] = ["two light"]
    assert written(4, "--max-tokens", "5", "--ignore-eos") == (2, found)
    assert f'{lines}:4: "passages" is two light, and must be a list of texts' in capsys.readouterr().err
    assert generate(["--from", str(folder / "run"), "--max-tokens", "4", "the river", "one stone"]) == 0
    assert "--- 'the river'" in capsys.readouterr().out
