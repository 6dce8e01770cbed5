"""Llama, and a GPT with rotary positions, as transformers computes them: logits, loss and every gradient."""

from typing import Any

import numpy as np
import pytest

from mtjax.config import Config
from mtjax.config.sizes import attention_biases, head_dim, mlp_bias, mlp_size, num_kv_heads
from mtjax.models.rope_scaling import attention_factor
from mtjax.models.rotary import frequencies
from tests.parity.compare import Named, assert_next_token_parity, padded, relative, shaken
from tests.tiny import tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

TOLERANCE = 2e-5

LLAMA3 = {
    "rope_theta": 100.0,
    "rope_scaling": "llama3",
    "rope_factor": 4.0,
    "rope_original_length": 64,
}
"""Wavelengths of 6 to 199 tokens at a head size of 8: some are kept, some scaled, some between."""

CONFIGS: dict[str, dict[str, Any]] = {
    "as many key heads": {},
    "2 key heads, fewer than 4 ways": {"num_kv_heads": 2},
    "Qwen3: norms of heads": {"num_kv_heads": 2, "qk_norm": True},
    "Qwen2: biases of query, key and value": {"num_kv_heads": 2, "attention_bias": "qkv"},
    "4 key heads, llama3 scaling, biases": {
        "num_kv_heads": 4,
        "hidden_size": 64,
        "attention_bias": "all",
        "mlp_bias": True,
        **LLAMA3,
    },
    "odd sizes, linear scaling, tied": {
        "num_layers": 3,
        "hidden_size": 36,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 6,
        "mlp_size": 84,
        "vocab_size": 256,
        "norm_epsilon": 1e-6,
        "rope_scaling": "linear",
        "rope_factor": 2.5,
        "tie_embeddings": True,
    },
}


def llama_config(**fields: Any) -> Config:
    return tiny_config(**{"family": "llama", "sequence_length": 24, **fields})


def rope_parameters(config: Config) -> dict[str, Any]:
    model = config.model
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling != "none":
        found |= {"rope_type": model.rope_scaling, "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        found |= {
            "low_freq_factor": model.rope_low_frequency_factor,
            "high_freq_factor": model.rope_high_frequency_factor,
            "original_max_position_embeddings": model.rope_original_length,
        }
    if model.rope_scaling == "yarn":
        found |= {
            "beta_fast": model.rope_beta_fast,
            "beta_slow": model.rope_beta_slow,
            "original_max_position_embeddings": model.rope_original_length,
            "truncate": model.rope_truncate,
        }
    if model.rope_scaling == "longrope":
        found |= {
            "short_factor": list(model.rope_short_factors or ()),
            "long_factor": list(model.rope_long_factors or ()),
            "original_max_position_embeddings": model.rope_original_length,
        }
    if model.rope_attention_factor is not None:
        found["attention_factor"] = model.rope_attention_factor
    if model.rope_fraction != 1:
        found["partial_rotary_factor"] = model.rope_fraction
    return found


def llama_of(config: Config) -> Any:
    model = config.model
    kind = {(False, 0): "Llama", (True, 0): "Qwen3", (False, 4): "Mixtral", (True, 4): "Qwen3Moe"}
    kind = "Qwen2" if attention_biases(model) == (True, False) else kind[model.qk_norm, model.num_experts]
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=mlp_size(model),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=num_kv_heads(model),
        **({"head_dim": head_dim(model)} if kind != "Qwen2" else {}),
        max_position_embeddings=model.sequence_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope_parameters(config),
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="eager",
        **({"attention_bias": attention_biases(model)[1], "mlp_bias": mlp_bias(model)} if kind == "Llama" else {}),
        **({"num_local_experts": 4, "num_experts_per_tok": model.experts_top_k} if model.num_experts else {}),
        **({"norm_topk_prob": model.router_normalize} if kind == "Qwen3Moe" else {}),
        **({"moe_intermediate_size": mlp_size(model)} if kind == "Qwen3Moe" else {}),
    )
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))


def as_llama(named: Named, config: Config) -> dict[str, Any]:
    """transformers' tensors under our names and in our shapes; theirs are [outputs, inputs]."""
    model = config.model
    width, hidden, inner = head_dim(model), model.hidden_size, mlp_size(model)
    q, k = (model.num_heads, width), (num_kv_heads(model), width)

    def stacked(name: str) -> np.ndarray:
        return np.stack([named[f"model.layers.{i}.{name}"] for i in range(model.num_layers)])

    def part(name: str, outputs: tuple[int, ...], inputs: tuple[int, ...]) -> dict[str, np.ndarray]:
        weight = np.moveaxis(stacked(f"{name}.weight"), 1, 2).reshape(-1, *inputs, *outputs)
        has_bias = f"model.layers.0.{name}.bias" in named
        bias = {"bias": stacked(f"{name}.bias").reshape(-1, *outputs)} if has_bias else {}
        return {"weight": weight, **bias}

    def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {"weight": np.stack([p["weight"] for p in parts], 2)} | (
            {"bias": np.stack([p["bias"] for p in parts], 1)} if "bias" in parts[0] else {}
        )

    query, key, value = (part(f"self_attn.{n}_proj", o, (hidden,)) for n, o in (("q", q), ("k", k), ("v", k)))
    grouped = {"query": query, "key_value": joined([key, value])}
    norms = ("query", "key") if model.qk_norm else ()
    if model.num_experts:
        up = stacked("mlp.experts.gate_up_proj").reshape(-1, model.num_experts, 2, inner, hidden)
        mlp = {
            "router": {"weight": stacked("mlp.gate.weight").mT},
            "up": {"weight": np.moveaxis(up, 4, 2)},
            "down": {"weight": stacked("mlp.experts.down_proj").mT},
        }
    else:
        gate_up = [part(f"mlp.{name}_proj", (inner,), (hidden,)) for name in ("gate", "up")]
        mlp = {"up": joined(gate_up), "down": part("mlp.down_proj", (hidden,), (inner,))}
    own = "experts" if model.num_experts else "mlp"
    layers = {
        "attention_norm": {"scale": stacked("input_layernorm.weight")},
        "attention": {
            "qkv": joined([query, key, value]) if q == k else grouped,
            "output": part("self_attn.o_proj", (hidden,), q),
            **({f"{name}_norm": {"scale": stacked(f"self_attn.{name[0]}_norm.weight")} for name in norms}),
        },
        f"{own}_norm": {"scale": stacked("post_attention_layernorm.weight")},
        own: mlp,
    }
    output = {} if model.tie_embeddings else {"output": padded(config, named["lm_head.weight"])}
    return {
        "embedding": padded(config, named["model.embed_tokens.weight"]),
        "final_norm": {"scale": named["model.norm.weight"]},
        "stack": {"layers": layers},
        **output,
    }


ON_MESH = ("2 key heads", "Qwen3", "4 key heads")
"""Beginnings of those that the suite computes on a mesh; the others it computes on one device."""


@pytest.mark.parametrize(
    ("fields", "mesh"),
    [
        pytest.param(
            fields,
            mesh,
            id=f"{mesh}-{name}",
            marks=[] if (mesh == "2x4") == name.startswith(ON_MESH) else [pytest.mark.exhaustive],
        )
        for mesh in ("1x1", "2x4")
        for name, fields in CONFIGS.items()
    ],
)
def test_llama_is_that_of_transformers(fields: dict[str, Any], mesh: str) -> None:
    config = llama_config(**fields)
    assert_next_token_parity(llama_of(config), config, mesh, lambda named: as_llama(named, config), TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_kv_heads": 2},
        pytest.param({"num_kv_heads": 4, "qk_norm": True, "experts_top_k": 3, "router_normalize": False}),
    ],
    ids=["Mixtral", "Qwen3's experts"],
)
def test_experts_are_those_of_transformers_and_so_are_the_gradients_of_routers(fields: dict[str, Any]) -> None:
    config = llama_config(**fields, num_experts=4, router_aux_loss=0.0)
    mesh = "data=2,expert=2,model=2"
    assert_next_token_parity(llama_of(config), config, mesh, lambda named: as_llama(named, config), TOLERANCE)


def as_neox(named: Named, config: Config) -> dict[str, Any]:
    """GPT-NeoX keeps query, key and value of a head together: [heads x 3 x head_dim, inputs]."""
    model = config.model
    heads, width, hidden = model.num_heads, head_dim(model), model.hidden_size

    def stacked(name: str) -> np.ndarray:
        return np.stack([named[f"gpt_neox.layers.{i}.{name}"] for i in range(model.num_layers)])

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    def linear(name: str) -> dict[str, np.ndarray]:
        return {"weight": np.moveaxis(stacked(f"{name}.weight"), 1, 2), "bias": stacked(f"{name}.bias")}

    qkv, output = linear("attention.query_key_value"), linear("attention.dense")
    weight = np.moveaxis(qkv["weight"].reshape(-1, hidden, heads, 3, width), 3, 2)
    bias = np.moveaxis(qkv["bias"].reshape(-1, heads, 3, width), 2, 1)
    attention = {
        "qkv": {"weight": weight, "bias": bias},
        "output": output | {"weight": output["weight"].reshape(-1, heads, width, hidden)},
    }
    layers = {
        "attention_norm": norm("input_layernorm"),
        "attention": attention,
        "mlp_norm": norm("post_attention_layernorm"),
        "mlp": {"up": linear("mlp.dense_h_to_4h"), "down": linear("mlp.dense_4h_to_h")},
    }
    final = {
        name: named[f"gpt_neox.final_layer_norm.{theirs}"] for name, theirs in (("scale", "weight"), ("bias",) * 2)
    }
    return {
        "embedding": padded(config, named["gpt_neox.embed_in.weight"]),
        "output": padded(config, named["embed_out.weight"] if "embed_out.weight" in named else named["lm_head.weight"]),
        "final_norm": final,
        "stack": {"layers": layers},
    }


def test_gpt_with_rotary_positions_and_an_untied_output_is_neox() -> None:
    config = tiny_config(
        position="rope",
        activation="gelu_exact",
        tie_embeddings=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = config.model
    theirs = transformers.GPTNeoXConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=mlp_size(model),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        max_position_embeddings=model.sequence_length,
        layer_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        use_parallel_residual=False,
        hidden_act="gelu",
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    network = shaken(lambda: transformers.GPTNeoXForCausalLM(theirs))
    assert_next_token_parity(network, config, "2x4", lambda named: as_neox(named, config), TOLERANCE)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": "llama3", "rope_factor": 8.0, "sequence_length": 131_072},
        {"rope_theta": 5e5, "rope_scaling": "llama3", "rope_factor": 32.0, "sequence_length": 131_072},
        {"rope_scaling": "linear", "rope_factor": 4.0},
        {},
        {"rope_scaling": "yarn", "rope_factor": 16.0, "rope_original_length": 4096, "sequence_length": 65_536},
        {
            "rope_theta": 1e6,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_length": 32_768,
            "rope_beta_fast": 16.0,
            "rope_beta_slow": 2.0,
            "rope_attention_factor": 1.3,
        },
        {"rope_scaling": "yarn", "rope_factor": 32.0, "rope_original_length": 4096, "rope_truncate": False},
    ],
    ids=["Llama 3.1", "Llama 3.2", "linear", "Llama 2", "YaRN", "YaRN, all settings", "YaRN, not rounded"],
)
def test_frequencies_at_full_size_are_those_of_transformers(fields: dict[str, Any]) -> None:
    config = llama_config(**{"hidden_size": 4096, "num_heads": 32, **fields})
    theirs = transformers.LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=config.model.sequence_length,
        rope_parameters=rope_parameters(config),
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    assert relative(frequencies(config.model), rotary.inv_freq.numpy()) < 1e-6
    np.testing.assert_allclose(frequencies(config.model), rotary.inv_freq.numpy(), rtol=2e-5)
    assert attention_factor(config.model) == pytest.approx(rotary.attention_scaling, rel=1e-12)
