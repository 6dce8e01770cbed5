"""Multi-head latent attention as transformers computes it (DeepSeek-V2 and V3): logits, loss and every gradient."""

import math
from typing import Any

import numpy as np
import pytest

from mtjax.config import Config
from tests.parity.compare import Named, assert_next_token_parity, padded, shaken
from tests.tiny import LATENT, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

TOLERANCE = 2e-5

CONFIGS: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "q_lora_rank": 28,
        "rope_scaling": "yarn",
        "rope_factor": 4.0,
        "rope_original_length": 8,
        "rope_attention_factor": 1.0,
        "attention_scale": 16**-0.5 * (0.1 * 0.7 * math.log(4) + 1) ** 2,
    },
    "DeepseekV2": {"norm_epsilon": 1e-3},
}
"""transformers' class -> settings. The latents' norms have an epsilon of their own."""


def latent_config(**fields: Any) -> Config:
    return tiny_config(**{"family": "llama", "sequence_length": 24, "norm_epsilon": 1e-6, **LATENT, **fields})


def deepseek(kind: str, config: Config) -> Any:
    model = config.model
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling == "yarn":
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
        rope |= {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 32, "beta_slow": 1}
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=4 * model.hidden_size,
        num_hidden_layers=model.num_layers,
        first_k_dense_replace=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_heads,
        max_position_embeddings=model.sequence_length,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope,
        q_lora_rank=model.q_lora_rank or None,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **LATENT,
    )
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))


def as_latent(named: Named, config: Config) -> dict[str, Any]:
    """transformers' tensors under our names and in our shapes: neighbors of rotated parts become halves."""
    model = config.model
    heads, still, rotated = model.num_heads, model.qk_nope_head_dim, model.qk_rope_head_dim

    def matrix(name: str, *shape: int) -> np.ndarray:
        weights = np.stack([named[f"model.layers.{i}.{name}.weight"] for i in range(model.num_layers)]).mT
        return weights.reshape(*weights.shape[:2], *shape) if shape else weights

    def scale(name: str) -> dict[str, np.ndarray]:
        return {"scale": np.stack([named[f"model.layers.{i}.{name}.weight"] for i in range(model.num_layers)])}

    def halves(weight: np.ndarray) -> np.ndarray:
        """Of the last `rotated` columns the even ones first, then the odd ones."""
        first, last = np.split(weight, [weight.shape[-1] - rotated], -1)
        return np.concatenate([first, last[..., ::2], last[..., 1::2]], -1)

    own = "self_attn"
    if model.q_lora_rank:
        query = {
            "query_down": {"weight": matrix(f"{own}.q_a_proj")},
            "query_norm": scale(f"{own}.q_a_layernorm"),
            "query_up": {"weight": halves(matrix(f"{own}.q_b_proj", heads, still + rotated))},
        }
    else:
        query = {"query": {"weight": halves(matrix(f"{own}.q_proj", heads, still + rotated))}}
    output = matrix(f"{own}.o_proj")
    layers = {
        "attention_norm": scale("input_layernorm"),
        "attention": {
            **query,
            "key_value_down": {"weight": halves(matrix(f"{own}.kv_a_proj_with_mqa"))},
            "key_value_norm": scale(f"{own}.kv_a_layernorm"),
            "key_value_up": {"weight": matrix(f"{own}.kv_b_proj", heads, still + model.v_head_dim)},
            "output": {"weight": output.reshape(-1, heads, model.v_head_dim, model.hidden_size)},
        },
        "mlp_norm": scale("post_attention_layernorm"),
        "mlp": {
            "up": {"weight": np.stack([matrix("mlp.gate_proj"), matrix("mlp.up_proj")], 2)},
            "down": {"weight": matrix("mlp.down_proj")},
        },
    }
    return {
        "embedding": padded(config, named["model.embed_tokens.weight"]),
        "final_norm": {"scale": named["model.norm.weight"]},
        "stack": {"layers": layers},
        "output": padded(config, named["lm_head.weight"]),
    }


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, id=f"{mesh}-{kind}", marks=[] if is_chosen else [pytest.mark.exhaustive])
        for number, kind in enumerate(CONFIGS)
        for mesh, is_chosen in (("1x1", number % 2 == 0), ("2x4", number % 2 == 1))
    ],
)
def test_latent_attention_is_that_of_transformers(kind: str, mesh: str) -> None:
    config = latent_config(**CONFIGS[kind])
    network = deepseek(kind, config)
    assert_next_token_parity(network, config, mesh, lambda named: as_latent(named, config), TOLERANCE)
