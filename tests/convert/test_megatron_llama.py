"""A Llama in Megatron-LM's checkpoints, old names and Megatron-Core's: the order of rows, any split, there and back."""

import shutil

import numpy as np
import pytest

from mtjax.commands.convert import main
from mtjax.convert.megatron_arguments import unsupported
from mtjax.runtime.checkpoints.weights import find_weights
from tests.convert.hf_folders import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    gpt2_shapes,
    llama_shapes,
    random_tensors,
    tensors_in,
    write_folder,
)
from tests.convert.megatron_llama import NAMES, write_llama

torch = pytest.importorskip("torch", reason="needs the extra megatron: pip install '.[megatron]'")
pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

PADDED = ("--vocab-size", "300", "--vocab-multiple", "256")
QKV = {f"parameters.stack.layers.attention.qkv.{part}.weight" for part in ("query", "key_value")}


def run(source, target, *options: str) -> int:
    return main(["--from", str(source), "--to", str(target), *options])


def prints(folder):
    return find_weights(folder).metadata["fingerprints"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Random weights in 16 bits, and the same converted from Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("llama")
    tensors = random_tensors(llama_shapes(), "float16")
    write_folder(folder / "hf", tensors, LLAMA_CONFIG)
    assert run(f"hf:{folder / 'hf'}", f"mtjax:{folder / 'ours'}", "--vocab-multiple", "256") == 0
    return folder, tensors


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("split", [(1, 1), (2, 2), (4, 1)], ids=str)
def test_every_implementation_and_split_gives_the_same_weights(reference, tmp_path, impl, split):
    folder, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, impl, split)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'ours'}", *PADDED) == 0
    assert prints(tmp_path / "ours") == prints(folder / "ours")
    found, expected = (find_weights(place).config.model for place in (tmp_path / "ours", folder / "ours"))
    trained = ("hidden_dropout", "attention_dropout")
    assert {n: v for n, v in vars(found).items() if n not in trained} == {
        n: v for n, v in vars(expected).items() if n not in trained
    }


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("split", [(1, 1), (2, 2)], ids=str)
def test_what_is_written_is_what_megatron_would_have_written(reference, tmp_path, impl, split):
    """Tensor by tensor, under the same names, against the files written by hand."""
    folder, tensors = reference
    rows = 128 * split[0] * -(-300 // (128 * split[0]))
    write_llama(tmp_path / "theirs", tensors, LLAMA_CONFIG, impl, split, rows=rows, extra_state=False)
    numbers = ["--tensor", str(split[0]), "--pipeline", str(split[1]), "--transformer-impl", impl]
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'ours'}", *numbers) == 0
    files = sorted((tmp_path / "theirs/iter_0000042").rglob("*.pt"))
    assert len(files) == split[0] * split[1]
    for path in files:
        expected = torch.load(path, weights_only=False)
        place = path.relative_to(tmp_path / "theirs/iter_0000042")
        found = torch.load(tmp_path / "ours/release" / place, weights_only=False)
        assert_alike(found["model"], expected["model"], str(place))
        for name, value in vars(expected["args"]).items():
            assert getattr(found["args"], name) == value, name


def assert_alike(found, expected, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_alike(found[name], expected[name], f"{where}.{name}")
        return
    assert found.dtype == expected.dtype and torch.equal(found, expected), where


@pytest.mark.parametrize("impl", NAMES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_bit_comes_back(tmp_path, impl, tied):
    assert_every_bit_comes_back(LLAMA_CONFIG | {"tie_word_embeddings": tied, "num_key_value_heads": 2}, impl, tmp_path)


@pytest.mark.parametrize("impl", NAMES)
def test_biases_of_query_key_and_value_alone_come_back(tmp_path, impl):
    """Qwen2's: --add-qkv-bias with --disable-bias-linear."""
    config = LLAMA_CONFIG | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": 4}
    shapes = llama_shapes(config)
    for name, (rows, *_) in list(shapes.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            shapes[name.replace(".weight", ".bias")] = (rows,)
    assert_every_bit_comes_back(config, impl, tmp_path, shapes)


def assert_every_bit_comes_back(config, impl, tmp_path, shapes=None):
    tensors = random_tensors(shapes or llama_shapes(config), "bfloat16")
    write_folder(tmp_path / "hf", tensors, config)
    split = ["--tensor", "2", "--pipeline", "2", "--transformer-impl", impl]
    assert run(f"hf:{tmp_path / 'hf'}", f"megatron:{tmp_path / 'megatron'}", *split) == 0
    assert run(f"megatron:{tmp_path / 'megatron'}", f"hf:{tmp_path / 'back'}") == 0
    found = tensors_in(tmp_path / "back")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name].view(np.uint16), tensor.view(np.uint16), err_msg=name)


@pytest.mark.parametrize(
    ("kind", "disorder", "wrong"),
    [
        ("qkv", lambda rows: torch.cat([rows[12:], rows[:12]]), QKV),
        ("gate_up", lambda rows: torch.cat([rows[40:], rows[:40]]), {"parameters.stack.layers.mlp.up.weight"}),
    ],
    ids=["groups", "gate and up"],
)
def test_the_orders_of_rows_matter(reference, tmp_path, kind, disorder, wrong):
    """Else the tests above would pass whatever order is taken."""
    folder, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "transformer_engine")
    path = next((tmp_path / "megatron").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    name = f"decoder.layers.1.{NAMES['transformer_engine'][kind]}"
    content["model"][name] = disorder(content["model"][name])
    torch.save(content, path)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'ours'}", *PADDED) == 0
    assert {n for n, number in prints(folder / "ours").items() if prints(tmp_path / "ours")[n] != number} == wrong


def test_missing_extra_and_misshapen_tensors_are_listed_together(reference, tmp_path, capsys):
    _, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "transformer_engine", (2, 2))

    def change(model) -> None:
        for name in list(model):
            if name.endswith("linear_fc2.weight"):
                del model[name]
            if name.endswith("linear_qkv.weight"):
                model[name] = model[name][:-6]
        if "decoder.final_layernorm.weight" in model:
            model["decoder.final_layernorm.bias"] = torch.zeros(32)

    for path in (tmp_path / "megatron").rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        change(content["model"])
        torch.save(content, path)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}", *PADDED) == 2
    said = capsys.readouterr().err
    assert "missing:\n    decoder.layers.{0-3}.mlp.linear_fc2.weight\n" in said
    assert "not part of this model:\n    decoder.final_layernorm.bias\n" in said
    assert (
        "of another shape:\n    decoder.layers.{0-3}.self_attention.linear_qkv.weight is 42x32, but should be 48x32"
        in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"], "nothing half-done is left"


def test_a_gpt_2_in_megatron_core_has_its_biases_and_positions(tmp_path):
    tensors = random_tensors(gpt2_shapes())
    write_folder(tmp_path / "hf", tensors, GPT2_CONFIG)
    split = ["--tensor", "2", "--pipeline", "3", "--transformer-impl", "transformer_engine"]
    assert run(f"hf:{tmp_path / 'hf'}", f"megatron:{tmp_path / 'core'}", *split) == 0
    first, last = (
        torch.load(tmp_path / f"core/release/mp_rank_01_00{stage}/model_optim_rng.pt", weights_only=False)["model"]
        for stage in (0, 2)
    )
    for name, theirs in {
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_bias": "transformer.h.0.ln_1.bias",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": "transformer.h.0.ln_2.weight",
        "decoder.layers.0.self_attention.linear_proj.bias": "transformer.h.0.attn.c_proj.bias",
    }.items():
        np.testing.assert_array_equal(first[name].numpy(), tensors[theirs], err_msg=name)
    words = tensors["transformer.wte.weight"]
    np.testing.assert_array_equal(last["output_layer.weight"].numpy()[: 300 - 256], words[256:])
    assert set(last) & {"embedding.word_embeddings.weight", "decoder.layers.2.mlp.linear_fc1.bias"} == set()
    assert run(f"megatron:{tmp_path / 'core'}", f"hf:{tmp_path / 'back'}") == 0
    found = tensors_in(tmp_path / "back")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_what_an_implementation_does_not_have_is_said(reference, tmp_path, capsys):
    folder, tensors = reference
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = LLAMA_CONFIG | {
        "rope_theta": 5e5,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
    }
    write_folder(tmp_path / "llama3", tensors, llama3)
    short = scaling | {"original_max_position_embeddings": 4096}
    write_folder(tmp_path / "short", tensors, LLAMA_CONFIG | {"rope_scaling": short})

    def said(source, *options: str) -> str:
        assert run(source, f"megatron:{tmp_path / 'never'}", *options) == 2
        assert not (tmp_path / "never").exists()
        return capsys.readouterr().err

    old = said(f"hf:{tmp_path / 'llama3'}", "--transformer-impl", "legacy")
    assert "rope_theta 500000 (only 10000); use --transformer-impl transformer_engine" in old
    assert "rope_scaling llama3; use --transformer-impl transformer_engine" in old
    core = ["--transformer-impl", "local"]
    assert "not support rope_scaling llama3 with rope_original_length 4096" in said(f"hf:{tmp_path / 'short'}", *core)
    assert "tensor parallel degree 8 does not divide kv_heads 4" in said(
        f"mtjax:{folder / 'ours'}", "--tensor", "8", *core
    )
    assert "--checkpoint-version 2 requires --transformer-impl legacy" in said(
        f"mtjax:{folder / 'ours'}", "--checkpoint-version", "2", *core
    )
    assert "checkpoint_version 1 does not support grouped-query attention" in said(
        f"mtjax:{folder / 'ours'}", "--checkpoint-version", "1"
    )
    assert run(f"hf:{tmp_path / 'llama3'}", f"megatron:{tmp_path / 'core'}", *core) == 0
    assert run(f"megatron:{tmp_path / 'core'}", f"mtjax:{tmp_path / 'ours'}", *PADDED) == 0
    model = find_weights(tmp_path / "ours").config.model
    assert (model.rope_theta, model.rope_scaling, model.rope_factor) == (5e5, "llama3", 4.0)
    # Written and read.
    ignored = "rope_scaling_factor is 4, and Megatron-LM before its pull request 6306 (August 2026) computes with 8"
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(ignored) == 2
    distributed = [f"megatron:{tmp_path / 'distributed'}", "--ckpt-format", "torch_dist"]
    assert run(f"hf:{tmp_path / 'llama3'}", *distributed) == 0
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count(ignored) == 1


def with_arguments(folder, tensors, impl, **arguments):
    """A checkpoint with other arguments than its model's."""
    write_llama(folder, tensors, LLAMA_CONFIG, impl)
    path = next(folder.rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    vars(content["args"]).update(arguments)
    torch.save(content, path)


def test_the_base_that_the_legacy_code_ignores_is_told(reference, tmp_path, capsys):
    folder, tensors = reference
    for name, base in (("same", 10_000), ("other", 500_000)):
        with_arguments(tmp_path / name, tensors, "legacy", rotary_base=base)
        assert run(f"megatron:{tmp_path / name}", f"mtjax:{tmp_path / name}-ours", *PADDED) == 0
        printed = capsys.readouterr()
        told = "rotary_base 500000 from the arguments, which Megatron-LM's legacy code ignores (it uses 10000): if the"
        assert (told in printed.out + printed.err) == (name == "other")
    assert prints(tmp_path / "other-ours") == prints(folder / "ours")


def test_two_scalings_of_rope_are_refused(reference, tmp_path, capsys):
    """Megatron-Core computes both, one of frequencies and one of positions."""
    _, tensors = reference
    both = {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2}
    with_arguments(tmp_path / "megatron", tensors, "local", **both)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}", *PADDED) == 2
    assert "rotary_seq_len_interpolation_factor is 2 beside use_rope_scaling" in capsys.readouterr().err
    without_rope = both | {"position_embedding_type": "learned_absolute"}
    assert [what for what in unsupported(without_rope, is_core=True) if "rope" in what or "rotary" in what] == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("no_rope_freq", 4),
        ("rotary_interleaved", True),
        ("apply_layernorm_1p", True),
        ("layernorm_zero_centered_gamma", True),
        ("use_mup", True),
        ("glu_linear_offset", 1.0),
        ("qk_l2_norm", True),
        ("window_size", (128, 0)),
        ("position_embedding_type", "yarn"),
    ],
)
def test_a_model_that_mtjax_does_not_have_is_refused(reference, tmp_path, capsys, argument, value):
    _, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "local")
    path = next((tmp_path / "megatron").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    setattr(content["args"], argument, value)
    torch.save(content, path)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}", *PADDED) == 2
    assert f"{argument} is {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: setattr(c["args"], "hidden_size", "many"), "hidden_size = 'many' should be"),
        (lambda c: setattr(c["args"], "norm_epsilon", "small"), "does not describe a model that mtjax can read"),
        (lambda c: c.update(args={"num_layers": 4}), "is missing hidden_size, num_attention_heads"),
        (lambda c: c.update(args=[4]), "does not describe a model that mtjax can read"),
        (lambda c: c.update(model=[1, 2]), "contains no model of Megatron-LM"),
        (lambda c: c.update(model={}), "contains no tensor of a GPT or BERT of Megatron-LM"),
        (lambda c: c.update(checkpoint_version="three"), "does not describe a model that mtjax can read"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_sentence(reference, tmp_path, capsys, change, said):
    _, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "local")
    path = next((tmp_path / "megatron").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}", *PADDED) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert error.startswith("error: ") and "\n" not in error
    assert list(tmp_path.iterdir()) == [tmp_path / "megatron"], "nothing half-done is left"


def test_a_table_that_is_missing_is_listed_like_any_tensor(reference, tmp_path, capsys):
    _, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "local")
    path = next((tmp_path / "megatron").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    for name in ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight"):
        del content["model"][name]
    torch.save(content, path)
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}", *PADDED) == 2
    said = capsys.readouterr().err
    assert "missing:\n    embedding.word_embeddings.weight\n    decoder.final_layernorm.weight\n" in said
    assert "of another shape" not in said


def test_formats_that_are_not_read_are_named(reference, tmp_path, capsys):
    _, tensors = reference
    write_llama(tmp_path / "megatron", tensors, LLAMA_CONFIG, "local")
    shutil.rmtree(tmp_path / "megatron/iter_0000042/mp_rank_00")
    (tmp_path / "megatron/iter_0000042/__0_0.distcp").write_bytes(b"")
    assert run(f"megatron:{tmp_path / 'megatron'}", f"mtjax:{tmp_path / 'never'}") == 2
    assert "iter_0000042 lacks .metadata" in capsys.readouterr().err
    write_llama(tmp_path / "t5", tensors, LLAMA_CONFIG, "local")
    path = next((tmp_path / "t5").rglob("*.pt"))
    content = torch.load(path, weights_only=False)
    content["model"] |= {n.replace("decoder.", "encoder."): t for n, t in content["model"].items()}
    torch.save(content, path)
    assert run(f"megatron:{tmp_path / 't5'}", f"mtjax:{tmp_path / 'never'}") == 2
    assert "is a BERT or T5 of Megatron-Core; only its GPT is supported" in capsys.readouterr().err
