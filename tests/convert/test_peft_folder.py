"""Folders of peft without peft: merged weights, commands, tokenizers, and what does not fit."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtjax.commands.convert import main as convert
from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.parameters import parameters_of
from mtjax.convert.peft_adapters import Adapters
from mtjax.convert.peft_copies import join_copies
from mtjax.convert.peft_source import PeftSource
from mtjax.convert.saved_model import SavedModel, model_of
from mtjax.convert.stream import config_of
from mtjax.errors import UserError
from mtjax.generate.weights import stop_ids_of
from tests.convert.hf_folders import (
    LLAMA_CONFIG,
    llama_shapes,
    random_tensors,
    small_tokenizer,
    tensors_in,
    write_folder,
)

MODULE = "model.layers.2.self_attn.q_proj"
SETTINGS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 2,
    "lora_alpha": 6,
    "target_modules": ["2.self_attn.q_proj"],
}


def write_adapters(folder: Path, base: Path, module: str = MODULE, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """An adapter of one matrix [48, 32], as peft names it."""
    random = np.random.default_rng(1)
    a, b = random.standard_normal((2, 32)).astype(np.float32), random.standard_normal((48, 2)).astype(np.float32)
    folder.mkdir()
    name = f"base_model.model.{module}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({**SETTINGS, "base_model_name_or_path": str(base), **settings})
    )
    return a, b


def base_of(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "base", random_tensors(llama_shapes(), "bfloat16"), LLAMA_CONFIG, tokenizer=True)


def test_a_merged_export_has_the_sum_and_the_base_s_other_tensors(tmp_path, capsys):
    base = base_of(tmp_path)
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    a, b = write_adapters(tmp_path / "adapters", base)
    small_tokenizer().save(str(tmp_path / "adapters/tokenizer.json"))
    (tmp_path / "adapters/chat_template.jinja").write_text("{{ messages }}")
    assert convert(["--from", str(tmp_path / "adapters"), "--to", f"hf:{tmp_path / 'merged'}"]) == 0
    assert f"1 adapter, merged into the weights of {base}" in capsys.readouterr().out
    theirs, merged = tensors_in(base), tensors_in(tmp_path / "merged")
    expected: dict[str, Any] = {name: array.astype(np.float32) for name, array in theirs.items()}
    expected[f"{MODULE}.weight"] = theirs[f"{MODULE}.weight"].astype(np.float64) + 3.0 * b.astype(np.float64) @ a
    assert merged.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(merged[name], array, rtol=1e-6, atol=1e-6 if name.startswith(MODULE) else 0)
    for name, folder in (("generation_config.json", base), ("chat_template.jinja", tmp_path / "adapters")):
        assert (tmp_path / "merged" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("module", [MODULE, "model.layers.0.mlp.gate_proj"], ids=["adapted", "not adapted"])
def test_nan_of_the_base_model_is_kept_and_named_and_that_of_the_adapters_file_refused(module, tmp_path, capsys):
    tensors = random_tensors(llama_shapes(), "bfloat16")
    tensors[f"{module}.weight"][3, 4] = np.nan
    base = write_folder(tmp_path / "base", tensors, LLAMA_CONFIG)
    write_adapters(tmp_path / "adapters", base, modules_to_save=["norm"])
    file = tmp_path / "adapters/adapter_model.safetensors"
    own, norm = load_file(file), np.ones(32, np.float32)
    save_file(own | {"base_model.model.model.norm.weight": norm}, file)
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'merged'}"]) == 0
    size = tensors[f"{module}.weight"].size
    said = f"note    {base}: 1 of {size:,} numbers of {module}.weight is NaN or infinite"
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("note ")] == [said]
    assert np.argwhere(np.isnan(tensors_in(tmp_path / "merged")[f"{module}.weight"])).tolist() == [[3, 4]]
    norm[5] = np.inf
    save_file(own | {"base_model.model.model.norm.weight": norm}, file)
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'again'}"]) == 2
    assert f"{file}: model.norm.weight has NaN or infinities that are not the base" in capsys.readouterr().err


def test_other_commands_read_adapters(tmp_path, capsys):
    base = base_of(tmp_path)
    (base / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    write_adapters(tmp_path / "adapters", base)
    saved = SavedModel.open(f"peft:{tmp_path / 'adapters'}")
    assert f"note    {tmp_path / 'adapters'}: 1 adapter, merged into the weights of {base}" in capsys.readouterr().err
    assert model_of(f"peft:{tmp_path / 'adapters'}", "--from") == saved.config.model
    name, tokenizer = saved.tokenizer()
    assert name == str(base / "tokenizer.json")
    assert stop_ids_of(saved, tokenizer) == {3, 4}  # as in transformers, without the config.json's
    # A chat model whose config.json has more ends; and one whose generation_config.json has none.
    (base / "config.json").write_text(json.dumps(LLAMA_CONFIG | {"eos_token_id": [3, 4, 5]}))
    saved = SavedModel.open(f"peft:{tmp_path / 'adapters'}")
    for own, ends in (("[4]", {4}), ("4", {4}), ("[]", {3, 4, 5}), ("null", {3, 4, 5})):
        (base / "generation_config.json").write_text(f'{{"eos_token_id": {own}}}')
        assert stop_ids_of(saved, tokenizer) == ends
    (base / "generation_config.json").write_text('{"do_sample": true}')
    assert stop_ids_of(saved, tokenizer) == {3, 4, 5}
    (base / "generation_config.json").write_text('{"eos_token_id": "3"}')
    with pytest.raises(UserError, match="generation_config.json: eos_token_id is '3', and must be a token's id"):
        stop_ids_of(saved, tokenizer)
    identity = saved.identity
    for path in (tmp_path / "adapters/adapter_model.safetensors", base / "config.json"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000_000))
        before, identity = identity, SavedModel.open(f"peft:{tmp_path / 'adapters'}").identity
        assert identity != before


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (MODULE, {"peft_type": "IA3"}, "peft_type is 'IA3', but must be 'LORA'"),
        (MODULE, {"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        (MODULE, {"layer_replication": [[0, 2]]}, "layer_replication is [[0, 2]]"),
        (MODULE, {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        (MODULE, {"use_dora": True}, f"use_dora is True, but the adapter of {MODULE} in"),
        (MODULE, {"rank_pattern": {"q_proj(": 2}}, "'q_proj(' in rank_pattern is not a regular expression"),
        (MODULE, {"alpha_pattern": ["q_proj"]}, "alpha_pattern is ['q_proj'], and must be an object with numbers"),
        (MODULE, {"lora_alpha": float("nan")}, f"lora_alpha of {MODULE} is nan, and must be a number"),
        (MODULE, {"r": 4}, f"the adapter of {MODULE} has rank 2, but"),
        (MODULE, {"rank_pattern": {"q_proj": 3}}, "adapter_config.json says 3"),
        (MODULE, {"lora_alpha": None}, f"lora_alpha of {MODULE} is None, and must be a number"),
        (MODULE, {"layers_to_transform": [0, 1]}, f"layers_to_transform is [0, 1], but {MODULE} has an adapter"),
        (MODULE, {"base_model_name_or_path": None}, "does not name the base model"),
        (MODULE, {"base_model_name_or_path": "/nowhere/at/all"}, "names the base model /nowhere/at/all, which is not"),
        (
            MODULE,
            {"target_modules": ["q_proj"]},
            "has no tensors of model.layers.0.self_attn.q_proj, which target_modules",
        ),
        (
            MODULE,
            {"target_modules": r".*\.2\..*_proj"},
            "has no tensors of model.layers.2.",
        ),
        (MODULE, {"modules_to_save": ["lm_head"]}, "has no tensors of lm_head, which modules_to_save of"),
        (
            MODULE,
            {"target_modules": "*q_proj"},
            "target_modules is '*q_proj', which is not a regular expression: nothing",
        ),
        (MODULE, {"exclude_modules": "(("}, "adapter_config.json: exclude_modules is '((', which is not a regular"),
        (MODULE, {"target_modules": 5}, "target_modules is 5, and must be a list of names, a regular expression or"),
        (MODULE, {"target_modules": True}, "adapter_config.json: target_modules is True, and must be a list of names"),
        (MODULE, {"modules_to_save": 7}, "adapter_config.json: modules_to_save is 7, and must be a list of names or"),
        (MODULE, {"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head', and must be a list of names or null"),
        (MODULE, {"exclude_modules": ["q", 1]}, "exclude_modules is ['q', 1], and must be a list of names"),
        ("model.layers.2.mlp.gate_proj", {}, "is for a tensor of shape (48, 32), but the base model's has (80, 32)"),
        ("model.layers.7.self_attn.q_proj", {}, "adapts model.layers.7.self_attn.q_proj.weight, which the base model"),
    ],
)
def test_what_does_not_fit_is_one_sentence(module, settings, said, tmp_path, capsys):
    write_adapters(tmp_path / "adapters", base_of(tmp_path), module, **settings)
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'merged'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "has no tensors: save the adapters again"),
        ({"lora_A.weight": np.zeros(0), "lora_B.weight": np.zeros(0)}, "has shapes (0,) and (0,), not [rank, inputs]"),
        (
            {"lora_A.weight": np.ones((2, 32, 1)), "lora_B.weight": np.ones((48, 2))},
            "has shapes (2, 32, 1) and (48, 2)",
        ),
        ({"lora_A.weight": np.ones((2, 32), np.int8), "lora_B.weight": np.ones((48, 2))}, "has dtype I8, but must"),
        ({"lora_A.weight": np.full((2, 32), np.nan), "lora_B.weight": np.ones((48, 2))}, "NaN or infinities that"),
        (
            {
                "lora_A.weight": np.ones((2, 32)),
                "lora_B.weight": np.ones((48, 2)),
                "lora_magnitude_vector": np.ones(48),
            },
            "use_dora is None, but the adapter of",
        ),
    ],
)
def test_tensors_that_are_no_adapter_are_one_sentence(tensors, said, tmp_path, capsys):
    write_adapters(tmp_path / "adapters", base_of(tmp_path))
    named = {
        f"base_model.model.{MODULE}.{name}": array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in tensors.items()
    }
    save_file(named, tmp_path / "adapters/adapter_model.safetensors")
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'merged'}"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_resized_vocabulary_says_how_to_resize_that_of_the_base_model(tmp_path, capsys):
    write_adapters(tmp_path / "adapters", base_of(tmp_path))
    table = np.zeros((310, 32), np.float32)
    save_file({"base_model.model.model.embed_tokens.weight": table}, tmp_path / "adapters/adapter_model.safetensors")
    (tmp_path / "adapters/adapter_config.json").write_text(
        json.dumps({**SETTINGS, "target_modules": [], "base_model_name_or_path": str(tmp_path / "base")})
    )
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'merged'}"]) == 2
    assert "embed_tokens.weight has 310 tokens, but that of the base model has 300: save the base model after " in (
        capsys.readouterr().err
    )


def test_exclusions_and_layers_need_no_tensors(tmp_path):
    settings = {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"], "layers_to_transform": [2]}
    write_adapters(tmp_path / "adapters", base_of(tmp_path), **settings)
    assert len(SavedModel.open(f"peft:{tmp_path / 'adapters'}").source.parameters) > 0


def test_layers_to_transform_leave_the_output_as_it_is(tmp_path):
    """In peft, a module without a layer's number is in none of the layers."""
    write_adapters(
        tmp_path / "adapters", base_of(tmp_path), target_modules=["q_proj", "lm_head"], layers_to_transform=[2]
    )
    assert len(SavedModel.open(f"peft:{tmp_path / 'adapters'}").source.parameters) > 0


@pytest.mark.parametrize(
    ("first", "other", "differ"),
    [
        ({"a.weight": np.ones((2, 3))}, {"a.weight": np.ones((2, 3))}, False),
        ({"a.weight": np.ones((2, 3))}, {"a.weight": np.ones((2, 4))}, True),
        ({"a.weight": np.ones((2, 3))}, {"a.weight": np.ones(3)}, True),
        ({"a.weight": np.zeros((2, 3))}, {}, True),  # zeros replace the weights
        ({}, {"a.weight": np.zeros((2, 3))}, True),
        ({"a.lora_A.weight": np.ones((2, 3)), "a.lora_B.weight": np.zeros((4, 2))}, {}, False),  # nothing is added
        (
            {"a.lora_A.weight": np.ones((2, 3)), "a.lora_B.weight": np.ones((4, 2))},
            {"a.lora_A.weight": np.ones((2, 5)), "a.lora_B.weight": np.ones((4, 2))},
            True,
        ),
    ],
)
def test_a_shared_block_and_its_copy_have_the_same_change(first, other, differ, tmp_path):
    tensors = {f"first.{n}": array for n, array in first.items()} | {f"copy.{n}": array for n, array in other.items()}
    write_adapters(tmp_path / "adapters", tmp_path)
    named = {f"base_model.model.{name}": array.astype(np.float32) for name, array in tensors.items()}
    save_file(named, tmp_path / "adapters/adapter_model.safetensors")
    adapters = Adapters(tmp_path / "adapters")
    if differ:
        with pytest.raises(
            UserError, match=r"changes first\.a.* and copy\.a.*, which share their weights, in different"
        ):
            join_copies(adapters, {"copy": "first"})
    else:
        join_copies(adapters, {"copy": "first"})
        assert not [name for name in (*adapters.modules, *adapters.full) if name.startswith("copy")]


def test_what_two_folders_both_have_is_one_sentence(tmp_path, capsys):
    base = base_of(tmp_path)
    write_adapters(tmp_path / "adapters", base)
    (tmp_path / "adapters/chat_template.jinja").write_text("another")
    assert convert(["--from", f"peft:{tmp_path / 'adapters'}", "--to", f"hf:{tmp_path / 'merged'}"]) == 2
    assert f"has chat_template.jinja, but no tokenizer: copy that of the base model, {base}" in capsys.readouterr().err
    (base / "adapter_config.json").write_text("{}")
    assert convert(["--from", f"hf:{base}", "--to", f"mtjax:{tmp_path / 'merged'}"]) == 2
    assert f"{base} has a model and adapters (adapter_config.json)" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_folder_of_another_kind_is_named(tmp_path, capsys):
    base = base_of(tmp_path)
    write_adapters(tmp_path / "adapters", base)
    assert convert(["--from", f"hf:{tmp_path / 'adapters'}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 2
    assert f"it looks like peft:{tmp_path / 'adapters'}" in capsys.readouterr().err
    assert convert(["--from", f"peft:{base}", "--to", f"mtjax:{tmp_path / 'ours'}"]) == 2
    assert f"it looks like hf:{base}" in capsys.readouterr().err


MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 30,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 8,
    "tie_word_embeddings": False,
}


def experts_folder(folder: Path, **changes: Any) -> Path:
    """Adapters of a Mixtral's experts, rank 2: both parameters in both layers; `changes` replace keys or tensors."""
    family = MODEL_TYPES["mixtral"]
    config = config_of(family.model_settings(MIXTRAL, frozenset(), ""), "")
    shapes = family.table_of(config.model).select(parameters_of(config)).shapes(30)
    write_folder(folder / "base", random_tensors(shapes), MIXTRAL)
    random, tensors = np.random.default_rng(1), {}
    for module in (f"base_model.model.model.layers.{layer}.mlp.experts" for layer in range(2)):
        for wrapped, (inputs, outputs) in ((".base_layer", (16, 24)), ("", (12, 16))):
            for matrix, shape in (("A", (6, inputs)), ("B", (outputs, 6))):
                tensors[f"{module}{wrapped}.lora_{matrix}.weight"] = random.standard_normal(shape).astype(np.float32)
    settings = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    settings |= SETTINGS | settings | {"base_model_name_or_path": str(folder / "base")}
    tensors |= {name: array for name, array in changes.items() if ".lora_" in name}
    settings |= {key: value for key, value in changes.items() if ".lora_" not in key}
    (folder / "adapters").mkdir()
    save_file({n: a for n, a in tensors.items() if a is not None}, folder / "adapters/adapter_model.safetensors")
    (folder / "adapters/adapter_config.json").write_text(json.dumps(settings))
    return folder / "adapters"


def test_adapters_of_experts_are_added_to_each_expert(tmp_path):
    folder = experts_folder(tmp_path, alpha_pattern={r".*\.gate_up_proj": 10})
    assert convert(["--from", f"peft:{folder}", "--to", f"hf:{tmp_path / 'merged'}"]) == 0
    merged, base = tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "base")
    adapters = load_file(folder / "adapter_model.safetensors")
    # B has the experts next to each other for each rank, A one after the other.
    a, b = (adapters[f"base_model.model.model.layers.1.mlp.experts.base_layer.lora_{x}.weight"] for x in "AB")
    update = 5 * np.sum([np.outer(b[:, rank * 3 + 2].astype(np.float64), a[4 + rank]) for rank in range(2)], 0)
    for name, half in (("w1", update[:12]), ("w3", update[12:])):
        name = f"model.layers.1.block_sparse_moe.experts.2.{name}.weight"
        np.testing.assert_allclose(merged[name] - base[name], half, atol=1e-5)


def test_adapters_of_experts_are_read_once_for_each_layer(tmp_path, monkeypatch):
    folder, names = experts_folder(tmp_path), list[str]()
    read = Adapters.read
    monkeypatch.setattr(Adapters, "read", lambda self, name: names.append(name) or read(self, name))
    assert convert(["--from", f"peft:{folder}", "--to", f"hf:{tmp_path / 'merged'}"]) == 0
    assert sorted(names) == sorted(load_file(folder / "adapter_model.safetensors"))


FIRST = "base_model.model.model.layers.1.mlp.experts"
OTHER = "base_model.model.other.layers.1.mlp.experts"
WRONG_EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "a layer without": (
        {f"{FIRST}{wrapped}.lora_{x}.weight": None for wrapped in ("", ".base_layer") for x in "AB"},
        r"has no adapter of model\.layers\.1\.mlp\.experts\.gate_up_proj, which target_parameters of .* names",
    ),
    "one of two": (
        {f"{FIRST}.base_layer.lora_{x}.weight": None for x in "AB"},
        r"has 1 adapter of model\.layers\.1\.mlp\.experts, but .* names gate_up_proj and down_proj",
    ),
    "none named": (
        {"target_parameters": None},
        r"has 2 adapters of model\.layers\.0\.mlp\.experts, but target_parameters in .* names none of its parameters: ",
    ),
    "two modules of a layer": (
        {f"{OTHER}.lora_{x}.weight": np.zeros(s, np.float32) for x, s in (("A", (6, 12)), ("B", (16, 6)))}
        | {f"{OTHER}.base_layer.lora_{x}.weight": np.zeros(s, np.float32) for x, s in (("A", (6, 16)), ("B", (24, 6)))},
        r"adapts model\.layers\.1\.mlp\.experts and other\.layers\.1\.mlp\.experts, but .* has one module of experts",
    ),
    "DoRA": ({"use_dora": True}, r"use_dora is True, which peft .* but .* has one of model\.layers\.0\.mlp\.experts: "),
    "turned": ({"fan_in_fan_out": True}, r"fan_in_fan_out is True, which peft does not have with adapters of experts"),
    "half of an adapter": ({f"{FIRST}.lora_B.weight": None}, r"has no lora_B of model\.layers\.1\.mlp\.experts"),
    "another rank": ({"r": 3}, r"experts\.gate_up_proj has rank 2, but .* says 3"),
    "another size": (
        {f"{FIRST}.lora_A.weight": np.zeros((6, 13), np.float32)},
        r"experts\.down_proj has shapes \(6, 13\) and \(16, 6\), but the 3 experts .* \[experts \* rank, 12\]",
    ),
    "no layer with": (
        {
            f"base_model.model.model.layers.{layer}.mlp.experts{wrapped}.lora_{x}.weight": None
            for layer in range(2)
            for wrapped in ("", ".base_layer")
            for x in "AB"
        }
        | {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((2, 16), np.float32)}
        | {"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": np.zeros((16, 2), np.float32)},
        "has no adapter of experts, which target_parameters of .* names",
    ),
    "a router": (
        {"target_parameters": ["mlp.gate.weight"]},
        r"target_parameters has 'mlp\.gate\.weight', but must have names that end in gate_up_proj, up_proj or down_",
    ),
    "a word": ({"target_parameters": "experts.down_proj"}, "must be a list of names or null"),
}


@pytest.mark.parametrize("case", WRONG_EXPERTS)
def test_adapters_of_experts_that_do_not_fit_are_refused(case, tmp_path):
    changes, said = WRONG_EXPERTS[case]
    with pytest.raises(UserError, match=said):
        PeftSource(experts_folder(tmp_path, **changes), 1)
