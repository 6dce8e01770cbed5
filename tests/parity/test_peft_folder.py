"""Adapters that peft saved, merged into their base model: logits are those of peft, or the key is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtjax.convert.peft_source import PeftSource
from mtjax.errors import UserError
from tests.convert.hf_folders import tensors_in, write_back
from tests.parity.compare import relative
from tests.parity.decoder_types import CASES, OF_GPT2, Case
from tests.parity.test_decoder_types import TOLERANCE, logits_of, network_of, our_logits, tokens_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)
peft = pytest.importorskip("peft", reason="needs the extra parity: pip install '.[parity]'")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match"),  # those that peft makes for fused experts
]

LLAMA, TIED = Case("llama"), Case("llama", {"tie_word_embeddings": True})
GPT2 = Case("gpt2", {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 32}, OF_GPT2)
MATRICES = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def adapted(case: Case, folder: Path, **settings: Any) -> Any:
    """Saves a network, and drawn adapters beside it; returns peft's network."""
    network_of(case).save_pretrained(folder / "base")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager").eval()
    torch.manual_seed(1)
    network = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(folder / "peft")
    return network.eval()


READ: dict[str, tuple[Case, dict[str, Any]]] = {
    "ranks and alphas of modules, DoRA with rsLoRA, norms": (
        LLAMA,
        {"target_modules": MATRICES, "use_dora": True, "use_rslora": True, "modules_to_save": ["input_layernorm"]}
        | {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3}}
        | {"alpha_pattern": {"layers.0.self_attn.k_proj": 9, "v_proj": 2}},
    ),
    "one layer, output that was tied": (
        TIED,
        {"target_modules": MATRICES, "layers_to_transform": 1, "modules_to_save": ["lm_head"]},
    ),
    "embedding and output": (LLAMA, {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True}),
    "transposed matrices, biases": (GPT2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "bias": "all"}),
    "renamed modules": (CASES["nemotron_h"], {"target_modules": ["q_proj", "o_proj"]}),
    "delta nets, gated attention": (
        CASES["qwen3_next, three taps, biases, dense layers, a key for each query"],
        {"target_modules": ["q_proj", "in_proj_qkvz"]},
    ),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
READ |= {
    "experts, named as modules": (CASES["mixtral"], {"target_modules": ["w1", "w2", "w3", "q_proj"]}),
    "experts, stacked and turned": (CASES["gpt_oss"], {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts in some layers, one parameter": (
        CASES["deepseek_v3"],
        {"target_modules": [], "target_parameters": EXPERTS[1:], "alpha_pattern": {"experts.down_proj": 9}},
    ),
    "experts, stacked": (
        CASES["granitemoe"],
        {"target_modules": [], "use_rslora": True}
        | {"target_parameters": ["experts.gate_up_proj", "0.block_sparse_moe.experts.down_proj"]},
    ),
    "experts without a gate": (
        CASES["nemotron_h with experts"],
        {"target_modules": [], "target_parameters": ["experts.up_proj", "experts.down_proj"]},
    ),
}
TOKENS = 8
LONG = ("renamed modules", "embedding and output", "experts, stacked", "experts without a gate")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in READ])
def test_merged_weights_give_the_logits_of_peft(name: str, tmp_path: Path) -> None:
    case, settings = READ[name]
    # Of all 70 tokens of recurrent layers, float32's rounding is 1.1e-5 on some CPUs.
    network, tokens = adapted(case, tmp_path, **settings), tokens_of(case)[:, :TOKENS]
    expected = logits_of(network, tokens)
    with network.disable_adapter():
        assert relative(logits_of(network, tokens), expected) > 0.1  # there is something to compare
    assert relative(our_logits(PeftSource(tmp_path / "peft", 1), tokens), expected) < TOLERANCE


def test_adapters_of_an_encoder_decoder_are_merged(tmp_path: Path) -> None:
    """Every tensor of the merged model is that of peft's own merging."""
    sizes = {"vocab_size": 90, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "base")
    network = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=3, target_modules=["q", "v", "wo"])
    network = peft.get_peft_model(network, config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(tmp_path / "peft")
    write_back(PeftSource(tmp_path / "peft", 1), tmp_path / "back")
    network.merge_and_unload().save_pretrained(tmp_path / "merged")
    theirs, ours, base = (tensors_in(tmp_path / folder) for folder in ("merged", "back", "base"))
    changed = {name for name in theirs if not np.array_equal(theirs[name], base[name])}
    assert len(changed) == 2 * 3 + 2 * 5
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-6)


def with_predictions(folder: Path) -> None:
    """Adds a layer of multi-token prediction to a saved network, which transformers does not build."""
    tensors, path = tensors_in(folder), folder / "config.json"
    config = json.loads(path.read_text())
    count, size = config["num_hidden_layers"], config["hidden_size"]
    of_last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    if config["model_type"] == "qwen3_next":
        own = "mtp.layers.0."
    tensors |= {own + n.removeprefix(of_last): array for n, array in tensors.items() if n.startswith(of_last)}
    norms = {
        own + name: np.ones(size, np.float32) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    tensors |= norms | {f"{own}eh_proj.weight": np.ones((size, 2 * size), np.float32)}
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("qwen3_next, three taps, biases, dense layers, a key for each query", ["q_proj", "v_proj", "in_proj_ba"]),
        pytest.param("glm4_moe", ["q_proj", "v_proj"], marks=pytest.mark.long),
        ("deepseek_v3", ["q_b_proj", "o_proj"]),
    ],
)
def test_layers_of_predictions_have_no_adapters(name: str, targets: list[str], tmp_path: Path) -> None:
    adapted(CASES[name], tmp_path, target_modules=targets)
    with_predictions(tmp_path / "base")
    source = PeftSource(tmp_path / "peft", 1)
    assert source.origin.config.model.mtp_num_layers == (name == "deepseek_v3")


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_classes_without_a_pooler_or_a_head_are_complete(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 90, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=40, max_position_embeddings=16)
    transformers.BertForPreTraining(config).save_pretrained(tmp_path / "base")
    network = getattr(transformers, kind).from_pretrained(tmp_path / "base")
    task = "FEATURE_EXTRACTION" if kind == "BertModel" else None
    config = peft.LoraConfig(task_type=task, r=3, target_modules=["query", "dense"])
    peft.get_peft_model(network, config).save_pretrained(tmp_path / "peft")
    assert PeftSource(tmp_path / "peft", 1).origin.config.model.num_layers == 2
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    lacking = {name: array for name, array in tensors.items() if ".layer.1.intermediate." not in name}
    save_file(lacking, tmp_path / "peft/adapter_model.safetensors")
    with pytest.raises(
        UserError, match=r"has no tensors of bert\.encoder\.layer\.1\.intermediate\.dense, which target"
    ):
        PeftSource(tmp_path / "peft", 1)


@pytest.mark.parametrize(
    ("case", "settings", "said"),
    [
        (LLAMA, {"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        (
            TIED,
            {"modules_to_save": ["embed_tokens"]},
            "changes model.embed_tokens.weight, to which the base model ties",
        ),
        (
            CASES["qwen3_moe"],
            {"target_parameters": ["mlp.gate.weight"]},
            "target_parameters has 'mlp.gate.weight', but must",
        ),
        (CASES["zamba2"], {"target_modules": ["o_proj"]}, "o_proj, which share their weights, in different ways"),
    ],
)
def test_what_peft_computes_otherwise_is_refused(
    case: Case, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    adapted(case, tmp_path, **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(UserError, match=said):
        PeftSource(tmp_path / "peft", 1)


def test_every_key_of_peft_is_known_or_refused(tmp_path: Path) -> None:
    """A key that a later version of peft adds is refused, unless it is off."""
    adapted(LLAMA, tmp_path, target_modules=["q_proj"])
    path = tmp_path / "peft/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_new_kind": True, "use_other_kind": False}))
    with pytest.raises(UserError, match="adapters that mtjax does not read: use_new_kind is True: merge"):
        PeftSource(tmp_path / "peft", 1)
