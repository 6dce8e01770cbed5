"""What is said about weights that are not there, or of a network that mtjax does not have."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from mtjax import cli
from mtjax.config import Config, replace
from mtjax.convert.model_types.registry import MODEL_TYPES, family_of_config, family_of_model
from mtjax.convert.saved_model import parse_named
from mtjax.convert.stream import check_folder, config_of, new_folder, understood
from mtjax.errors import UserError
from mtjax.families.registry import FAMILIES
from tests.families.dummy import ROW


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mistal", ""),
        ("qwen", ""),
        ("gemma3", ": it reads more than text"),
        ("phimoe", ": its router is a sparse mixer, which scores each chosen expert apart"),
        ("kimi_linear", ": some of its layers have linear attention"),
        ("deberta-v2", ": its scores have terms of distances apart from those of tokens"),
        ("apertus", ": its activation is xielu, which has trained parameters"),
    ],
)
def test_a_network_that_mtjax_lacks_has_no_neighbour(name: str, reason: str) -> None:
    """Names that are spelled alike are other networks; of those that transformers has, what is missing is named."""
    with pytest.raises(UserError) as refused:
        family_of_config({"model_type": name}, "config.json")
    said = str(refused.value)
    assert said.startswith(f"config.json: model_type '{name}' is not supported{reason}; supported are gpt2, ")
    assert "did you mean" not in said


def test_a_type_made_of_other_models_is_refused_with_their_names() -> None:
    config = {"text_config": {"model_type": "qwen2"}, "vision_config": {"model_type": "siglip"}, "other_config": {}}
    with pytest.raises(UserError, match=r"is made of other models, text_config \(qwen2\) and vision_config \(siglip\)"):
        family_of_config({"model_type": "llava_onevision", **config}, "config.json")


def test_another_activation_of_gemma_is_refused() -> None:
    """transformers computes it; only "gelu" stands for the tanh approximation."""
    family = MODEL_TYPES["gemma"]
    assert family.model_settings({"hidden_act": "gelu"}, frozenset(), "")["activation"] == "geglu"
    with pytest.raises(UserError, match="hidden_act is 'silu', but must be 'gelu' or 'gelu_pytorch_tanh' or "):
        family.model_settings({"hidden_act": "silu"}, frozenset(), "config.json")


def test_a_gpt_neox_has_heads_of_the_width_that_its_sizes_give() -> None:
    """transformers takes another one for the rotation alone."""
    sizes, family = {"hidden_size": 48, "num_attention_heads": 6}, MODEL_TYPES["gpt_neox"]
    assert family.model_settings({**sizes, "head_dim": 8}, frozenset(), "")["num_heads"] == 6
    with pytest.raises(UserError, match="head_dim is 3, but must be hidden_size / num_attention_heads, 8"):
        family.model_settings({**sizes, "head_dim": 3}, frozenset(), "config.json")
    with pytest.raises(UserError, match="config.json: num_attention_heads is 0, and must be at least 1"):
        family.model_settings({**sizes, "num_attention_heads": 0}, frozenset(), "config.json")


def test_null_under_another_name_contradicts_true() -> None:
    """transformers takes the other name, so that null leaves the biases out."""
    family, config = MODEL_TYPES["sarvam_moe"], {"attention_bias": True, "use_qkv_bias": None}
    assert family.renamed(config)[1] == [
        "use_qkv_bias is None, but attention_bias, the same setting, is True: remove one of them"
    ]
    assert family.renamed({**config, "attention_bias": 1})[1] == [
        "use_qkv_bias is None, but attention_bias, the same setting, is 1: remove one of them"
    ]
    assert family.renamed({"use_qkv_bias": None}) == ({}, [])


def test_a_name_of_the_hub_is_answered_with_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", "--from", "hf:gpt2", "--to", "mtjax:new"]) == 2
    advice = "hf: needs a folder, or OWNER/NAME on the Hugging Face hub: download the model with `hf download gpt2 "
    advice += "--local-dir gpt2`"
    assert capsys.readouterr().err == f"error: gpt2 does not exist. {advice}\n"
    with pytest.raises(UserError, match="on the Hugging Face hub, use --init-from hf:HuggingFaceTB/SmolLM2-135M"):
        parse_named("HuggingFaceTB/SmolLM2-135M", "--init-from")
    for path in ("a/b/c", "/nowhere", "../a"):
        with pytest.raises(UserError, match=f"{Path(path)} does not exist$"):
            check_folder(Path(path), "hf")


def test_what_a_file_lacks_is_named() -> None:
    with (
        pytest.raises(UserError, match="config.json does not describe .*: it is missing n_embd"),
        understood("config.json"),
    ):
        raise KeyError("n_embd")


@pytest.mark.parametrize(
    ("kind", "key", "value", "said"),
    [
        ("llama", "use_qk_norm", True, "use_qk_norm is True, which this type does not have"),
        ("llama", "sliding_window", 4096, "sliding_window is 4096, which this type does not have"),
        ("mistral", "attention_bias", True, "attention_bias is True, which this type does not have"),
        ("bert", "num_experts", 8, "num_experts is 8, which this type does not have"),
        ("gpt2", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0, which this type does not have"),
        ("olmo2", "clip_qkv", 8.0, "clip_qkv is 8.0, which this type does not have"),
        ("opt", "_remove_final_layer_norm", True, "_remove_final_layer_norm is True, but must be False"),
        ("opt", "word_embed_proj_dim", 512, ""),
        ("qwen2", "is_causal", False, "is_causal is False, but must be True"),
        ("qwen3_next", "hidden_act", "gelu", "hidden_act is 'gelu', but must be 'silu' or 'swish'"),
        ("bamba", "hidden_act", "gelu", "hidden_act is 'gelu', but must be 'silu' or 'swish'"),
        ("gpt2", "is_causal", False, "is_causal is False, but must be True"),
        ("llama", "is_causal", True, ""),
        ("llama", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, and must be between 1 and 10000"),
        ("gptj", "n_head", 0, "n_head is 0, and must be at least 1"),
        ("llama", "sliding_window", None, ""),
        ("llama", "logits_scaling", 1.0, ""),
    ],
)
def test_keys_that_change_a_network_are_known_to_its_type(kind: str, key: str, value: object, said: str) -> None:
    family = MODEL_TYPES[kind]
    refused = pytest.raises(UserError, match=said) if said else nullcontext()
    with refused, understood("config.json"):
        family.model_settings({"model_type": kind, key: value}, frozenset(), "config.json")


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("mistral", {"sliding_window": 0}, "attention_window (sliding_window in config.json) is 0, and must be"),
        ("llama", {"rms_norm_eps": -1.0}, "norm_epsilon (rms_norm_eps in config.json) is -1.0, and must be a finite"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rope_fraction (rotary_pct in config.json) is 1.5, and must be above 0, at"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": -2.0}},
            "rope_factor (factor in config.json) is -2.0, and must be a finite number above 0",
        ),
        (
            "llama",
            {"num_key_value_heads": 5},
            "num_heads (num_attention_heads in config.json) 32 is not divisible by num_kv_heads (num_key_value_heads "
            "in config.json) 5; the nearest num_kv_heads that fit are 4 and 8",
        ),
        ("gpt2", {"n_head": 5}, "not divisible by num_heads (n_head in config.json) 5; the nearest num_heads that fit"),
        ("gpt2", {"num_attention_heads": 5}, "not divisible by num_heads (num_attention_heads in config.json) 5; "),
        (
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 9},
            "experts_top_k (num_experts_per_tok in config.json) 9 is above num_experts (num_local_experts in ",
        ),
        ("deepseek_v3", {"n_group": 7}, "not divisible by expert_groups (n_group in config.json) 7; the nearest "),
        (
            "gptj",
            {"num_hidden_layers": -7},
            "n_layer (num_hidden_layers in config.json) is -7, and must be between 1 and 10000",
        ),
        ("granite", {"logits_scaling": -16}, "config.json: logits_scaling is -16, and must be a number above 0"),
        ("granite", {"logits_scaling": 0}, "config.json: logits_scaling is 0, and must be a number above 0"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar is -4, and must be a number above 0"),
        ("gptj", {"rotary_dim": 257}, "rotary_dim is 257, and must be above 0 and at most 256, the width of a head"),
        ("llama", {"rope_theta": -1.0}, "config.json: rope_theta is -1.0, and must be a finite number above 0"),
    ],
)
def test_settings_have_the_names_that_config_json_has(kind: str, config: dict, said: str) -> None:
    family = MODEL_TYPES[kind]
    with pytest.raises(UserError) as refused, family.naming_keys(config):
        config_of(family.model_settings(config, frozenset({"lm_head.weight"}), "config.json"), "config.json")
    assert said in str(refused.value)


def test_a_plain_word_is_no_key() -> None:
    """ "factor" is a key, too, which a sentence may have in another sense."""
    said, family = "rope_factor is 0, a factor of positions", MODEL_TYPES["llama"]
    with pytest.raises(UserError, match=r"^rope_factor \(factor in config.json\) is 0"), family.naming_keys({}):
        raise UserError(said)


NEEDED = {
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "seed_oss": {"max_position_embeddings": 4096},
    "glm4_moe": {"head_dim": 128},
}
"""What the types need besides their defaults, which describe no model."""


COVERING = (
    *("nemotron_h", "mamba2", "bamba", "zamba2", "falcon_h1", "granitemoehybrid", "qwen3_next", "phi3", "gptj", "mpt"),
    *("minicpm3", "minimax_m2", "hunyuan_v1_moe", "glm4_moe", "modernbert", "gpt_neo", "opt", "exaone", "hyperclovax"),
    *("gemma2", "ministral3", "deepseek_v3", "youtu"),
)
"""Types that together have the parts of config.json of all."""


WRONG = (-7, "x", [], [1], {"a": 1}, None, True)


def _unnamed(kind: str) -> Iterator[str]:
    """Yields what is said of values of the wrong kind without the key that has it."""
    family = MODEL_TYPES[kind]
    for key in sorted({*family.keys, *(each.theirs for each in family.fields), "rope_scaling"}):
        for value in WRONG if key != "head_dim" else WRONG[:-2]:  # null: what the sizes give
            config = {**NEEDED.get(kind, {}), key: value}
            try:
                with family.naming_keys(config):
                    with understood("config.json"):
                        settings = family.model_settings(config, frozenset({"lm_head.weight"}), "config.json")
                    config_of(settings, "config.json")
            except UserError as e:
                if not re.search(rf"\b{key}\b", str(e)):
                    yield f"{key} {value!r}: {e}"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in COVERING else pytest.mark.long) for kind in MODEL_TYPES]
)
def test_a_value_that_is_refused_is_named_by_its_key(kind: str) -> None:
    assert list(_unnamed(kind)) == []


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("llama", {"rope_scaling": -7}, "rope_scaling is -7, but must be an object"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling.factor is '2', but must be a",
        ),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64', but must be an integer"),
        ("llama", {"hidden_size": 64.5}, "hidden_size is 64.5, but must be an integer"),
        ("llama", {"rms_norm_eps": [1e-6]}, "rms_norm_eps is [1e-06], but must be a number"),
        ("llama", {"attention_bias": "false"}, "attention_bias is 'false', but must be true or false"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act is ['silu'], but must be a string"),
        ("qwen3", {"layer_types": "x"}, "layer_types is 'x', but must be a list of strings"),
        (
            "qwen2_moe",
            {"mlp_only_layers": {"a": 1}},
            "mlp_only_layers is {'a': 1}, but must be a list of integers",
        ),
        ("mpt", {"attn_config": {"alibi": "no"}}, "attn_config.alibi is 'no', but must be true or false"),
        ("bert", {"hidden_size": "64"}, "hidden_size is '64', but must be an integer"),
        ("gpt2", {"num_attention_heads": "5"}, "num_attention_heads is '5', but must be an integer"),
        ("nemotron_h", {"hybrid_override_pattern": ["M"]}, "hybrid_override_pattern is ['M'], but must be a string"),
        ("minicpm3", {"hidden_size": None}, "hidden_size is None, which a minicpm3 can't have"),
        ("phi3", {"rope_scaling": {"a": 1}}, "rope_scaling has a, which mtjax does not support"),
        ("exaone4", {"sliding_window_pattern": "LLLX"}, "is 'LLLX', but must be an integer or a string of L and G"),
        ("exaone4", {"sliding_window_pattern": "LG"}, "sliding_window_pattern is 'LG', which needs layer_types"),
        ("cohere2", {"sliding_window_pattern": "LG"}, "sliding_window_pattern is 'LG', but must be an integer"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, "moe_topk differs between layers ([1, 2]), but must be the same"),
        ("hunyuan_v1_moe", {"moe_topk": []}, "moe_topk is [], but must be an integer, or a list of one for each layer"),
        ("qwen3_moe", {"num_experts": [8, 8]}, "num_experts is [8, 8], but must be an integer"),
        ("distilbert", {"dropout": "0.1"}, "dropout is '0.1', but must be a number"),
        ("bloom", {"seq_length": "64"}, "seq_length is '64', but must be an integer"),
        ("gpt_neo", {"resid_dropout": "0"}, "resid_dropout is '0', but must be a number"),
        ("roberta", {"intermediate_size": "64"}, "intermediate_size is '64', but must be an integer"),
        ("t5", {"d_ff": "64"}, "d_ff is '64', but must be an integer"),
        ("llama", {"num_hidden_layers": [7] * 99}, "num_hidden_layers is [7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, ..."),
        ("llama", {"quantization_config": "fp8"}, "quantization_config is 'fp8', but must be an object"),
        ("bert", {"compression_config": [1]}, "compression_config is [1], but must be an object"),
        ("llama", {"quantization_config": []}, "quantization_config is [], but must be an object"),
    ],
)
def test_a_value_of_another_kind_is_refused_as_it_was_typed(kind: str, config: dict, said: str) -> None:
    """Words would count as true, and empty objects as false."""
    with pytest.raises(UserError) as refused, understood("config.json"):
        MODEL_TYPES[kind].model_settings({**NEEDED.get(kind, {}), **config}, frozenset(), "config.json")
    assert str(refused.value).startswith("config.json") and said in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("exaone4", {"sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"]}),
        ("exaone_moe", {"sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"]}),
        ("hunyuan_v1_moe", {"moe_topk": [1, 1], "num_experts": [4, 4]}),
        ("bert", {"truncate": "longest_first", "bias": "none", "factor": "x", "alpha": [1]}),
        ("t5", {"truncate": "longest_first", "bias": "none", "factor": "x", "alpha": [1]}),
        ("gpt2", {"truncate": "longest_first", "bias": "none", "type": 1}),
        ("seed_oss", {"max_position_embeddings": 524_288, "num_attention_heads": 80, "num_hidden_layers": 64}),
    ],
)
def test_values_that_transformers_allows_are_read(kind: str, config: dict) -> None:
    """Keys may have values of several kinds, or be of no type; no batch limits the length that a model has."""
    config = {"num_hidden_layers": 2} | config if kind in ("exaone4", "exaone_moe", "hunyuan_v1_moe") else config
    settings = MODEL_TYPES[kind].model_settings(config, frozenset({"lm_head.weight"}), "config.json")
    model = config_of(settings, "config.json").model
    if "layer_types" in config:
        assert (model.window_layers, model.rope_layers) == ("SF", "RN")
    if kind == "hunyuan_v1_moe":
        assert (model.experts_top_k, model.num_experts) == (1, 4)


OUTPUT = frozenset({"shared.weight", "lm_head.weight"})


@pytest.mark.parametrize(
    ("kind", "config", "names", "is_tied"),
    [
        ("t5", {}, OUTPUT - {"lm_head.weight"}, True),
        ("t5", {"tie_word_embeddings": False}, OUTPUT, False),
        ("t5", {"tie_word_embeddings": True, "scale_decoder_outputs": False}, OUTPUT, False),  # transformers 5's T5 1.1
        ("umt5", {"tie_word_embeddings": True, "scale_decoder_outputs": True}, OUTPUT, True),
        ("mt5", {"tie_word_embeddings": True}, OUTPUT, False),
        ("t5", {"scale_decoder_outputs": False}, OUTPUT - {"lm_head.weight"}, True),
        ("t5", {"scale_decoder_outputs": None}, OUTPUT, False),
        ("mt5", {}, OUTPUT - {"lm_head.weight"}, True),
        ("mt5", {"tie_word_embeddings": False}, OUTPUT - {"lm_head.weight"}, None),
    ],
)
def test_a_t5_s_output_is_tied_as_in_transformers_5(
    kind: str, config: dict, names: frozenset, is_tied: bool | None
) -> None:
    if is_tied is None:
        with pytest.raises(UserError, match=f"tie_word_embeddings of this {kind} is false, but there is no lm_head"):
            MODEL_TYPES[kind].model_settings(config, names, "config.json")
    else:
        assert MODEL_TYPES[kind].model_settings(config, names, "config.json")["tie_embeddings"] == is_tied


def test_a_family_without_types_of_transformers_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "dummy", ROW)
    for family, said in (
        ("dummy", "use --to mtjax:DIR"),
        ("retro", "write its decoder as a gpt with --without-encoder"),
    ):
        with pytest.raises(UserError, match=f"^transformers has no model of the family {family}: {said}$"):
            family_of_model(replace(Config(), family=family).model)


@pytest.mark.parametrize(
    ("version", "is_tied", "factor"),
    [("4.44.0", True, 1.0), ("4.44.0", None, 16.0), ("5.1.0", True, 16.0), (None, True, 16.0)],
)
def test_a_tied_mt5_of_transformers_4_is_scaled(version: str | None, is_tied: bool | None, factor: float) -> None:
    """transformers 4 multiplied the outputs of a tied mT5 by d_model^-0.5, and 5 never does."""
    config = {"d_model": 256, "transformers_version": version, "tie_word_embeddings": is_tied}
    config = {key: value for key, value in config.items() if value is not None}
    settings = MODEL_TYPES["mt5"].model_settings(config, OUTPUT - {"lm_head.weight"}, "config.json")
    assert (settings["tie_embeddings"], settings["output_scale"]) == (True, factor)
    model = config_of(settings, "").model
    # Written as a type that says so in every version.
    written = family_of_model(model, "mt5")
    assert written.config_json(model)["scale_decoder_outputs"] == (factor == 1)
    assert written.model_type == ("t5" if factor == 1 else "mt5")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"feed_forward_proj": "gelu", "dense_act_fn": "relu"},
            "dense_act_fn is 'relu', but feed_forward_proj is 'gelu'",
        ),
        ({"feed_forward_proj": "relu", "is_gated_act": True}, "is_gated_act is True, but feed_forward_proj is 'relu'"),
    ],
)
def test_a_t5_s_activation_is_the_same_in_all_keys(config: dict, said: str) -> None:
    """transformers saves three keys, and follows those that `feed_forward_proj` does not have."""
    with pytest.raises(UserError, match=said):
        MODEL_TYPES["t5"].model_settings(config, OUTPUT, "config.json")
    gated = {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}
    assert MODEL_TYPES["t5"].model_settings(gated, OUTPUT, "config.json")["activation"] == "geglu"


@pytest.mark.parametrize("kind", ["gpt_oss", "cwm", "ministral3"])
def test_null_rope_parameters_are_the_type_s_default(kind: str) -> None:
    """transformers takes YaRN or Llama 3's scaling for a null of all these types; two were read without scaling."""
    family = MODEL_TYPES[kind]
    missing, null = (
        family.model_settings({"model_type": kind, **more}, frozenset(), "") for more in ({}, {"rope_parameters": None})
    )
    assert null == missing
    assert null["rope_scaling"] == ("llama3" if kind == "cwm" else "yarn")


def test_an_empty_object_of_rope_is_none() -> None:
    """transformers 5.24 takes YaRN for a null alone, else a base of 10000 without scaling."""
    config = {"model_type": "ministral3", "rope_parameters": {}}
    settings = MODEL_TYPES["ministral3"].model_settings(config, frozenset(), "config.json")
    assert (settings["rope_theta"], settings["rope_scaling"]) == (10000.0, "none")


def test_a_file_that_cannot_be_read_is_not_called_a_target_that_cannot_be_written(tmp_path: Path) -> None:
    """The source is read while the target's folder is open."""
    source, target = tmp_path / "config.json", tmp_path / "out"
    source.mkdir()
    with pytest.raises(IsADirectoryError) as read, new_folder(target):
        source.read_text()
    assert read.value.filename == str(source)
    either = f"^the source can't be read, or {target} can't be written: Input/output error$"
    with pytest.raises(UserError, match=either), new_folder(target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # as a read from a bad disk: it names no file
    with pytest.raises(BrokenPipeError), new_folder(target):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # of what is printed
    assert list(tmp_path.iterdir()) == [source]


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A full disk, whose error names no file, and names that are taken."""
    target, taken = tmp_path / "out", tmp_path / "file"
    taken.write_text("")
    with pytest.raises(UserError, match=f"^{target} can't be written: No space left on device$"), new_folder(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(UserError, match=f"^{target} can't be written: Is a directory$"), new_folder(target) as folder:
        (folder / "weights").mkdir()
        shutil.copyfile(taken, folder / "weights")
    with pytest.raises(UserError, match=f"^{taken}/out can't be written: Not a directory$"), new_folder(taken / "out"):
        pass
