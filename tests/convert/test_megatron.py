"""Megatron-LM's checkpoints: every version's order of rows, any split, damage, and no code run from a file."""

import os
import shutil

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.convert.megatron_files import MegatronCheckpoint, load
from mtjax.runtime.checkpoints.weights import find_weights
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, tensors_in, write_folder
from tests.convert.megatron_folders import write_gpt

torch = pytest.importorskip("torch", reason="needs the extra megatron: pip install '.[megatron]'")
pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

PADDED = ("--vocab-multiple", "256")
FOUR_LAYERS = GPT2_CONFIG | {"n_layer": 4}


def run(source, target, *options: str) -> int:
    return main(["--from", str(source), "--to", str(target), *options])


def prints(folder):
    return find_weights(folder).metadata["fingerprints"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Random weights of four layers, and the fingerprints of the same, converted from Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("reference")
    shapes = gpt2_shapes()
    shapes |= {n.replace(".h.2.", ".h.3."): s for n, s in shapes.items() if ".h.2." in n}
    tensors = random_tensors(shapes)
    hf = write_folder(folder / "hf", tensors, FOUR_LAYERS, tokenizer=True)
    assert run(f"hf:{hf}", f"mtjax:{folder / 'ours'}", *PADDED) == 0
    return folder, tensors


@pytest.mark.parametrize("version", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("split", [(1, 1), (2, 2)])
def test_every_version_and_split_gives_the_same_weights(reference, tmp_path, version, split):
    folder, tensors = reference
    write_gpt(tmp_path / "megatron", tensors, version, *split)
    options = ["--vocab-size", "300", *PADDED]
    settings = (
        [] if version >= 2 else ["--config", str(folder / "ours/config.toml")]
    )  # old ones don't say the MLP's size
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'ours'}", *options, *settings) == 0
    assert prints(tmp_path / "ours") == prints(folder / "ours")
    assert find_weights(tmp_path / "ours").config.model == find_weights(folder / "ours").config.model


def test_interleaved_stages_are_put_in_order(reference, tmp_path):
    folder, tensors = reference
    write_gpt(tmp_path / "megatron", tensors, 3.0, 1, 2, chunks=2)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'ours'}", "--vocab-size", "300", *PADDED) == 0
    assert prints(tmp_path / "ours") == prints(folder / "ours")


def test_the_orders_of_rows_differ(reference, tmp_path):
    """Else the test above would pass whatever order is taken."""
    folder, tensors = reference
    write_gpt(tmp_path / "megatron", tensors, 3.0)
    path = next((tmp_path / "megatron").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    for version in (0.0, 1.0):
        torch.save(content | {"checkpoint_version": version}, path)
        target = tmp_path / f"ours-{version}"
        assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{target}", "--vocab-size", "300", *PADDED) == 0
        wrong = {n for n, number in prints(folder / "ours").items() if prints(target)[n] != number}
        assert wrong == {f"parameters.stack.layers.attention.qkv.{x}" for x in ("weight", "bias")}


@pytest.mark.parametrize("split", [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("version", [0, 3])
def test_what_is_written_is_read_again(reference, tmp_path, split, version):
    folder, tensors = reference
    numbers = ["--tensor", str(split[0]), "--pipeline", str(split[1]), "--checkpoint-version", str(version)]
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'megatron'}", *numbers) == 0
    files = sorted(str(p.relative_to(tmp_path / "megatron")) for p in (tmp_path / "megatron").rglob("*.pt"))
    assert len(files) == split[0] * split[1]
    assert files[-1] == f"release/mp_rank_{split[0] - 1:02}{'_001' if split[1] > 1 else ''}/model_optim_rng.pt"
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "release"
    assert sum(p.stat().st_size for p in (tmp_path / "megatron").rglob("*.pt")) < 2.2 * _bytes(tensors)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"hf:{tmp_path / 'back'}") == 0
    found = tensors_in(tmp_path / "back")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"),
        (("--transformer-impl", "local"), "decoder.layers.0.input_layernorm.weight"),
        (("--transformer-impl", "legacy"), "language_model.encoder.layers.0.input_layernorm.weight"),
        (("--checkpoint-version", "2"), "language_model.encoder.layers.0.input_layernorm.weight"),
    ],
)
def test_names_are_megatron_cores_unless_the_version_or_an_option_says_otherwise(
    reference, tmp_path, options, expected
):
    folder, _ = reference
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'megatron'}", *options) == 0
    assert expected in MegatronCheckpoint(tmp_path / "megatron").shapes
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'back'}", *PADDED) == 0
    assert prints(tmp_path / "back") == prints(folder / "ours")


def _bytes(tensors) -> int:
    return sum(t.nbytes for t in tensors.values())


def test_what_is_written_is_what_megatron_would_have_written(reference, tmp_path):
    """Tensor by tensor, under the same names, against the files written by hand."""
    folder, tensors = reference
    write_gpt(tmp_path / "theirs", tensors, 3.0, 2, 2, rows=512)
    sizes = ("--tensor", "2", "--pipeline", "2", "--transformer-impl", "legacy")
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'ours'}", *sizes) == 0
    for place in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"):
        expected = torch.load(tmp_path / "theirs/iter_0000042" / place / "model_optim_rng.pt", weights_only=False)
        found = torch.load(tmp_path / "ours/release" / place / "model_optim_rng.pt", weights_only=False)
        assert found["checkpoint_version"] == expected["checkpoint_version"]
        assert_alike(found["model"], expected["model"], place)
        for name, value in vars(expected["args"]).items():
            assert getattr(found["args"], name) == value, name


def assert_alike(found, expected, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_alike(found[name], expected[name], f"{where}.{name}")
        return
    expected = torch.where(expected == 7.0, 0.0, expected)  # padding of the vocabulary
    assert torch.equal(found, expected), where


def test_half_precision_comes_back(reference, tmp_path):
    folder, _ = reference
    for dtype in ("bfloat16", "float16"):
        there, back = tmp_path / f"megatron-{dtype}", tmp_path / f"back-{dtype}"
        assert run(f"mtjax:{folder / 'ours'}", f"megatron:{there}", "--tensor", "2", "--dtype", dtype) == 0
        assert run(f"megatron:{there}", f"hf:{back}") == 0
        assert run(f"mtjax:{folder / 'ours'}", f"hf:{tmp_path / dtype}", "--dtype", dtype) == 0
        expected = tensors_in(tmp_path / dtype)
        for name, tensor in tensors_in(back).items():
            np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


class Attack:
    """Unpickling it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class LossScaler:
    """Stands for a class of Megatron's own, which is not installed where the file is read."""

    def __init__(self) -> None:
        self.scale = 2.0**16


def test_no_code_of_a_file_is_run_and_unknown_classes_do_not_matter(reference, tmp_path, capsys):
    folder, tensors = reference
    marker = tmp_path / "attacked"
    write_gpt(tmp_path / "attack", tensors, 3.0, extra={"optimizer": Attack(str(marker))})
    torch.load(next((tmp_path / "attack").rglob("*.pt")), weights_only=False)
    assert marker.exists(), "the attack works where code is run"
    marker.rmdir()
    assert run(f"megatron:{tmp_path / 'attack'}", f"mtjax:{tmp_path / 'never'}", "--vocab-size", "300") == 2
    assert "can't be read as a torch checkpoint without running code" in capsys.readouterr().err
    assert not marker.exists()

    write_gpt(tmp_path / "fp16", tensors, 3.0, extra={"optimizer": {"loss_scaler": LossScaler()}})
    assert run(f"megatron:{tmp_path / 'fp16'}", f"mtjax:{tmp_path / 'ours'}", "--vocab-size", "300", *PADDED) == 0
    assert prints(tmp_path / "ours") == prints(folder / "ours")
    scaler = load(next((tmp_path / "fp16").rglob("*.pt")))["optimizer"]["loss_scaler"]
    assert not isinstance(scaler, LossScaler) and not hasattr(scaler, "scale")


def test_what_is_wrong_is_said(reference, tmp_path, capsys):
    _, tensors = reference
    whole = write_gpt(tmp_path / "whole", tensors, 3.0, 2, 2)

    def said(change, *options: str) -> str:
        folder = shutil.copytree(whole, tmp_path / "wrong")
        change(folder / "iter_0000042")
        assert run(f"megatron:{folder}", f"mtjax:{tmp_path / 'never'}", *(options or ("--vocab-size", "300"))) == 2
        shutil.rmtree(folder)
        return capsys.readouterr().err

    def edit(path, change):
        content = torch.load(path / "model_optim_rng.pt", weights_only=False)
        change(content)
        torch.save(content, path / "model_optim_rng.pt")

    def drop(content):
        inner = content["model"]["language_model"]["encoder"]
        del inner["layers.0.mlp.dense_4h_to_h.bias"]
        inner["layers.0.surprise.weight"] = torch.zeros(3)

    def both_ranks(change, stage):
        return lambda folder: [edit(folder / f"mp_rank_{rank:02}_{stage:03}", change) for rank in range(2)]

    def set_argument(name, value):
        return lambda folder: [edit(p, lambda c: setattr(c["args"], name, value)) for p in folder.iterdir()]

    assert "is missing mp_rank_ 01_001 of 2 x 2" in said(lambda f: shutil.rmtree(f / "mp_rank_01_001"))
    assert "differ in language_model.encoder.layers.0" in said(lambda f: edit(f / "mp_rank_01_001", drop))
    listed = said(both_ranks(drop, 1))
    assert "missing:\n    language_model.encoder.layers.2.mlp.dense_4h_to_h.bias\n" in listed
    assert "not part of this model:\n    language_model.encoder.layers.2.surprise.weight\n" in listed
    norm = "layers.1.input_layernorm.weight"
    unequal = said(
        lambda f: edit(f / "mp_rank_01_000", lambda c: c["model"]["language_model"]["encoder"][norm].add_(1))
    )
    assert "layers.1.input_layernorm.weight must be replicated, but ranks 0 and 1 differ" in unequal
    head = said(
        lambda f: edit(f / "mp_rank_01_001", lambda c: c["model"]["word_embeddings_for_head"]["weight"].add_(1))
    )
    assert "word_embeddings_for_head.weight differs from" in head
    assert "num_experts is 8" in said(set_argument("num_experts", 8))
    assert "is missing hidden_size" in said(set_argument("hidden_size", None))
    assert "vocab_size 400 is above the 384 rows" in said(lambda f: None, "--vocab-size", "400")
    assert "checkpoint_version is 4" in said(
        lambda f: [edit(p, lambda c: c.update(checkpoint_version=4.0)) for p in f.iterdir()]
    )
    assert "can't be read" in said(lambda f: (f / "mp_rank_00_000/model_optim_rng.pt").write_bytes(b"no zip"))
    assert run(f"megatron:{tmp_path}", f"mtjax:{tmp_path / 'never'}") == 2
    assert "none of mp_rank_*, .metadata and latest_checkpointed_iteration.txt" in capsys.readouterr().err


def test_models_that_megatron_does_not_have_are_refused(reference, tmp_path, capsys):
    folder, _ = reference
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'a'}", "--pipeline", "3") == 2
    assert "--pipeline 3 does not divide the model's 4 layers" in capsys.readouterr().err
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'a'}", "--tensor", "3") == 2
    assert "tensor parallel degree 3 does not divide heads 8" in capsys.readouterr().err
