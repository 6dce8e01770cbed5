"""Weights of transformers' GPT-2 there and back: every bit, every name, and what is said when something is wrong."""

import json
import shutil
import sys

import jax
import numpy as np
import pytest

from mtjax import config as configs
from mtjax.commands.convert import main
from mtjax.convert.saved_model import SavedModel
from mtjax.layout.mesh import MeshShape
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.sharding.device_mesh import make_mesh
from tests.convert import hf_folders
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, tensors_in, write_folder

pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
from safetensors.numpy import save_file


def run(source, target, *options: str) -> int:
    return main(["--from", str(source), "--to", str(target), *options])


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """A GPT-2 with random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "gpt2"
    return write_folder(folder, random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)


@pytest.fixture(scope="module")
def ours(hf):
    """The same, converted."""
    target = hf.parent / "ours"
    assert run(f"hf:{hf}", f"mtjax:{target}", "--vocab-multiple", "256") == 0
    return target


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name].view(np.uint8), tensor.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_comes_back_in_the_type_it_had(tmp_path, dtype):
    tensors = random_tensors(gpt2_shapes(), dtype)
    write_folder(tmp_path / "hf", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'hf'}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert run(f"mtjax:{tmp_path / 'ours'}", f"hf:{tmp_path / 'back'}") == 0
    assert_same(tensors_in(tmp_path / "back"), tensors)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config.pop("torch_dtype") == dtype
    assert {name: config[name] for name in GPT2_CONFIG} == GPT2_CONFIG


def test_a_large_model_becomes_several_files_that_read_as_one(ours, hf, tmp_path):
    assert run(f"mtjax:{ours}", f"hf:{tmp_path / 'many'}", "--max-shard-gb", "0.00004") == 0
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert max(path.stat().st_size for path in (tmp_path / "many").glob("*.safetensors")) < 45_000
    assert_same(tensors_in(tmp_path / "many"), tensors_in(hf))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_in(hf).values())
    assert run(f"hf:{tmp_path / 'many'}", f"mtjax:{tmp_path / 'again'}", "--vocab-multiple", "256") == 0
    assert find_weights(tmp_path / "again").metadata["fingerprints"] == find_weights(ours).metadata["fingerprints"]


def test_the_vocabulary_is_padded_with_zeros(ours, hf):
    table = find_weights(ours).open("embedding").read().result()
    assert table.shape == (512, hf_folders.HIDDEN)
    np.testing.assert_array_equal(table[:300], tensors_in(hf)["transformer.wte.weight"])
    assert not table[300:].any()


def test_the_model_s_settings_and_tokenizer_come_along(ours, hf):
    found = configs.load(ours / "config.toml")
    model = found.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.mlp_size) == (3, 32, 8, 80)
    assert (model.sequence_length, model.vocab_size, model.vocab_multiple, model.norm_epsilon) == (16, 300, 256, 1e-6)
    assert found.data.tokenizer == str(ours.resolve() / "tokenizer.json")
    # Trained on from there by `next`: not for the 300,000 steps of 512 samples of pretraining.
    training, optimizer = found.training, found.optimizer
    assert (training.global_batch_size, training.microbatch_size, training.recompute) == (32, 4, "selective")
    assert optimizer.warmup_steps < training.steps == 1000 and optimizer.learning_rate == 2e-5
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (ours / name).read_bytes() == (hf / name).read_bytes()


def test_a_bare_model_and_old_names_are_understood(hf, ours, tmp_path):
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_in(hf).items()}
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}  # a causal mask, saved by old versions
    tensors = {n.replace("ln_1.weight", "ln_1.gamma").replace("ln_1.bias", "ln_1.beta"): t for n, t in tensors.items()}
    write_folder(tmp_path / "bare", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'bare'}", f"mtjax:{tmp_path / 'ours'}", "--vocab-multiple", "256") == 0
    assert find_weights(tmp_path / "ours").metadata["fingerprints"] == find_weights(ours).metadata["fingerprints"]


def test_missing_extra_and_misshapen_tensors_are_listed_together(hf, tmp_path, capsys):
    tensors = tensors_in(hf)
    for i in range(hf_folders.LAYERS):
        del tensors[f"transformer.h.{i}.mlp.c_fc.bias"]
    del tensors["transformer.ln_f.bias"]
    tensors["transformer.h.3.ln_1.weight"] = np.zeros(32, np.float32)
    tensors["transformer.wpe.weight"] = np.zeros((17, 32), np.float32)
    write_folder(tmp_path / "wrong", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'wrong'}", f"mtjax:{tmp_path / 'ours'}") == 2
    said = capsys.readouterr().err
    assert "missing:\n    transformer.ln_f.bias\n    transformer.h.{0-2}.mlp.c_fc.bias\n" in said
    assert "not part of this model:\n    transformer.h.3.ln_1.weight\n" in said
    assert "of another shape:\n    transformer.wpe.weight is 17x32, but should be 16x32\n" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "wrong"], "nothing half-done is left"


def test_an_output_that_differs_from_the_embedding_is_not_tied(hf, tmp_path, capsys):
    tensors = tensors_in(hf)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    write_folder(tmp_path / "same", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'same'}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert configs.load(tmp_path / "ours/config.toml").model.tie_embeddings
    tensors["lm_head.weight"] += 1
    write_folder(tmp_path / "other", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'other'}", f"mtjax:{tmp_path / 'untied'}") == 0
    assert "has lm_head.weight, which the config.json ties but is another tensor: not tied" in capsys.readouterr().out
    assert not configs.load(tmp_path / "untied/config.toml").model.tie_embeddings
    # A tied table may be saved under the name of the output alone.
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    write_folder(tmp_path / "renamed", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'renamed'}", f"mtjax:{tmp_path / 'tied'}") == 0
    found, same = (find_weights(tmp_path / name).metadata["fingerprints"] for name in ("tied", "ours"))
    assert found == same


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt3"}, "model_type 'gpt3' is not supported; supported are gpt2, llama"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"activation_function": "quick_gelu"}, "activation_function is 'quick_gelu'"),
    ],
)
def test_a_model_that_mtjax_does_not_have_is_refused(hf, tmp_path, capsys, changes, said):
    folder = shutil.copytree(hf, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(GPT2_CONFIG | changes))
    assert run(f"hf:{folder}", f"mtjax:{tmp_path / 'ours'}") == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_embd": "many"}, "n_embd is 'many', but must be an integer"),
        (
            {"n_head": 5},
            "hidden_size (n_embd in config.json) 32 is not divisible by num_heads (n_head in config.json) 5",
        ),
        ({"model_type": "mistral", "sliding_window": 0}, "hf/config.json: "),
        ({"bos_token_id": "7"}, "config.json: bos_token_id is '7', and must be a token's id, a list of them, or null"),
        ({"pad_token_id": False}, "config.json: pad_token_id is False, and must be a token's id"),
        ({"eos_token_id": [7, None]}, "config.json: eos_token_id is [7, None], and must be a token's id"),
        ({"n_layer": None}, "config.json is missing num_layers"),
        ({"n_head": 2.5}, "n_head is 2.5, but must be an integer"),
        (
            {"model_type": "llama", "activation_function": None, "rope_scaling": {"rope_type": "linear"}},
            "rope_scaling is {'rope_type': 'linear'}, which is missing 'factor'",
        ),
        ({"model_type": "llama", "rope_scaling": "linear"}, "rope_scaling is 'linear', but must be an object"),
        ({"model_type": "llama"}, "contains no tensor of Hugging Face's llama, but 40 others, such as "),
    ],
)
def test_a_config_that_makes_no_sense_is_one_sentence(hf, tmp_path, capsys, changes, said):
    folder = shutil.copytree(hf, tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps(GPT2_CONFIG | changes))
    assert run(f"hf:{folder}", f"mtjax:{tmp_path / 'ours'}") == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.startswith("error: ") and "\n" not in error
    assert list(tmp_path.iterdir()) == [folder], "nothing half-done is left"


def test_a_config_without_a_family_is_refused(hf, tmp_path, capsys):
    folder = shutil.copytree(hf, tmp_path / "hf")
    (folder / "config.json").write_text("{}")
    assert run(f"hf:{folder}", f"mtjax:{tmp_path / 'ours'}") == 2
    assert "config.json is missing model_type" in capsys.readouterr().err


def test_places_that_are_none(hf, ours, tmp_path, capsys):
    wrong = [
        ((f"hff:{hf}", f"mtjax:{tmp_path / 'a'}"), "did you mean 'hf'"),
        ((f"hf:{tmp_path / 'no'}", f"mtjax:{tmp_path / 'a'}"), "no does not exist\n"),
        ((f"megatron:{tmp_path / 'no'}", f"mtjax:{tmp_path / 'a'}"), "no does not exist"),
        ((f"hf:{ours}", f"mtjax:{tmp_path / 'a'}"), f"has no config.json; it looks like mtjax:{ours}"),
        ((f"megatron:{hf}", f"mtjax:{tmp_path / 'a'}"), f"latest_checkpointed_iteration.txt; it looks like hf:{hf}"),
        ((f"hf:{hf / 'config.json'}", f"mtjax:{tmp_path / 'a'}"), "config.json is not a folder"),
        ((f"mtjax:{hf}", f"hf:{tmp_path / 'a'}"), f"mtjax convert --from hf:{hf} --to mtjax:NEW"),
        ((f"mtjax:{tmp_path / 'no'}", f"hf:{tmp_path / 'a'}"), "it does not exist"),
        ((f"hf:{hf}", f"mtjax:{ours}"), "exists already"),
    ]
    for places, said in wrong:
        assert run(*places) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_options_that_would_do_nothing_are_refused(hf, ours, tmp_path, capsys):
    target = tmp_path / "a"
    wrong = [
        ((f"hf:{hf}", f"mtjax:{target}", "--dtype", "float16"), "--dtype has no effect on a conversion"),
        ((f"hf:{hf}", f"mtjax:{target}", "--tensor", "2"), "--tensor has no effect"),
        ((f"hf:{hf}", f"mtjax:{target}", "--vocab-size", "300"), "--vocab-size has no effect"),
        ((f"mtjax:{ours}", f"hf:{target}", "--vocab-multiple", "128"), "--vocab-multiple has no effect"),
        ((f"mtjax:{ours}", f"megatron:{target}", "--tensor", "0"), "must be at least 1"),
    ]
    for words, said in wrong:
        assert run(*words) == 2
        assert said in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(
    ("library", "extra", "kind"), [("safetensors", "convert", "hf"), ("torch", "megatron", "megatron")]
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    ours, tmp_path, capsys, monkeypatch, library, extra, kind
):
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00/model_optim_rng.pt").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert run(f"{kind}:{tmp_path}", f"mtjax:{tmp_path / 'a'}") == 2
    assert f"{library}: pip install '.[{extra}]'" in capsys.readouterr().err


def test_damage_is_noticed(hf, ours, tmp_path, capsys):
    cut = shutil.copytree(hf, tmp_path / "cut")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[:-100])
    assert run(f"hf:{cut}", f"mtjax:{tmp_path / 'a'}") == 2
    assert "can't be read as safetensors" in capsys.readouterr().err
    lost = shutil.copytree(ours, tmp_path / "lost")
    (lost / "weights/state/parameters.positions/0.0").unlink()  # a missing chunk reads as zeros
    assert run(f"mtjax:{lost}", f"hf:{tmp_path / 'a'}") == 2
    assert "positions differs from what was saved" in capsys.readouterr().err
    flipped = shutil.copytree(ours, tmp_path / "flipped")
    page = flipped / "weights/page/metadata"
    page.write_text(page.read_text().replace('"num_layers": 3', '"num_layers": 4'))
    assert run(f"mtjax:{flipped}", f"hf:{tmp_path / 'a'}") == 2
    assert "its metadata is not what was saved" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_one_file_wins_over_those_of_an_index_as_in_transformers(hf, tmp_path):
    tensors = tensors_in(hf)
    both = shutil.copytree(hf, tmp_path / "both")
    save_file({name: array + 1 for name, array in tensors.items()}, both / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (both / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(f"hf:{both}", f"hf:{tmp_path / 'a'}") == 0
    assert_same(tensors_in(tmp_path / "a"), tensors)


def test_a_tensor_in_two_files_must_be_the_same(hf, tmp_path, capsys):
    tensors = tensors_in(hf)
    twice = shutil.copytree(hf, tmp_path / "twice")
    (twice / "model.safetensors").rename(twice / "b.safetensors")
    save_file({"transformer.wte.weight": tensors["transformer.wte.weight"] + 1}, twice / "a.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "b.safetensors") | {"transformer.wte.weight": "a.safetensors"}}
    (twice / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(f"hf:{twice}", f"mtjax:{tmp_path / 'a'}") == 2
    said = (
        f"differs between {twice / 'a.safetensors'} and {twice / 'b.safetensors'}: save the model again with save_pre"
    )
    assert f"transformer.wte.weight {said}" in capsys.readouterr().err
    save_file({"transformer.wte.weight": tensors["transformer.wte.weight"]}, twice / "a.safetensors")
    assert run(f"hf:{twice}", f"hf:{tmp_path / 'b'}") == 0
    assert_same(tensors_in(tmp_path / "b"), tensors)
    # Nor are the same bytes of another type or shape the same tensor.
    for other in (tensors["transformer.wte.weight"].view(np.int32), tensors["transformer.wte.weight"].reshape(-1)):
        save_file({"transformer.wte.weight": other}, twice / "a.safetensors")
        assert run(f"hf:{twice}", f"mtjax:{tmp_path / 'a'}") == 2
        assert said in capsys.readouterr().err


def test_ids_that_are_not_read_may_be_anything(hf, tmp_path):
    folder = shutil.copytree(hf, tmp_path / "hf")
    odd = {"image_token_id": "x", "audio_token_id": False, "pad_token_id": [None], "bos_token_id": [7, None]}
    (folder / "config.json").write_text(json.dumps(GPT2_CONFIG | odd))
    assert run(f"hf:{folder}", f"mtjax:{tmp_path / 'ours'}") == 0


def test_weights_of_integers_are_refused(hf, tmp_path, capsys):
    name, folder = "transformer.h.0.mlp.c_fc.weight", shutil.copytree(hf, tmp_path / "integers")
    tensors = tensors_in(hf)
    save_file({**tensors, name: (20 * tensors[name]).astype(np.int8)}, folder / "model.safetensors")
    assert run(f"hf:{folder}", f"mtjax:{tmp_path / 'a'}") == 2
    assert f"contains weights of type I8 ({name}), which are quantized" in capsys.readouterr().err


def test_the_type_of_a_buffer_that_is_not_read_does_not_count(tmp_path):
    tensors = random_tensors(gpt2_shapes(), "bfloat16") | {"transformer.h.0.attn.masked_bias": np.zeros((), np.float32)}
    folder = write_folder(tmp_path / "hf", tensors, GPT2_CONFIG, tokenizer=True)
    assert run(f"hf:{folder}", f"hf:{tmp_path / 'back'}") == 0
    assert tensors_in(tmp_path / "back")["transformer.wte.weight"].dtype == tensors["transformer.wte.weight"].dtype


def test_numbers_too_large_for_float16_are_refused(hf, tmp_path, capsys):
    tensors = tensors_in(hf)
    tensors["transformer.ln_f.weight"][2:4] = np.inf, 1e5
    write_folder(tmp_path / "large", tensors, GPT2_CONFIG)
    assert run(f"hf:{tmp_path / 'large'}", f"hf:{tmp_path / 'half'}", "--dtype", "float16") == 2
    assert "values up to 100000, which overflow float16" in capsys.readouterr().err


def notes_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The notes of a command, without the progress that slow ones print."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("note ")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_and_infinities_are_named_and_kept(tmp_path, capsys, dtype):
    tensors = random_tensors(gpt2_shapes(), dtype)
    tensors["transformer.h.1.attn.c_attn.weight"][3, 5:7] = np.nan
    tensors["transformer.wte.weight"][2, 1] = -np.inf
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"]  # the same, though a NaN is not equal to itself
    tensors["lm_head.weight"][1, 0] = np.nan
    write_folder(tmp_path / "hf", tensors, GPT2_CONFIG)
    expected = (
        f"note    {tmp_path / 'hf'}: 2 of {tensors['transformer.wte.weight'].size:,} numbers of transformer.wte.weight "
        "are NaN or infinite, and so are some of 1 other tensor"
    )
    assert run(f"hf:{tmp_path / 'hf'}", f"mtjax:{tmp_path / 'ours'}") == 0
    assert notes_of(capsys) == [expected]
    saved = SavedModel.open(f"hf:{tmp_path / 'hf'}")
    model = ShardedModel(saved.config, make_mesh(MeshShape(), jax.devices("cpu")))
    saved.parameters(model)
    assert notes_of(capsys) == [expected]
    assert run(f"mtjax:{tmp_path / 'ours'}", f"hf:{tmp_path / 'back'}") == 0
    said = notes_of(capsys)
    size = tensors["transformer.wte.weight"].size
    assert said == [
        f"note    {tmp_path / 'ours'}: 2 of {size:,} numbers of embedding are NaN or infinite, and so are some of 1 "
        "other tensor"
    ]
    del tensors["lm_head.weight"]
    assert_same(tensors_in(tmp_path / "back"), tensors)
