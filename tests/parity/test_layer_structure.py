"""Norms, residual connections, embeddings and logits of other decoders than Llama's, as transformers computes them."""

from typing import Any

import numpy as np
import pytest

from mtjax.config import Config
from mtjax.config.sizes import GATED, head_dim, mlp_size, norm_vectors
from tests.parity.compare import Named, assert_next_token_parity, padded, shaken
from tests.tiny import tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

LLAMA: dict[str, Any] = {"family": "llama", "num_kv_heads": 4, "sequence_length": 24, "mlp_size": 48}
NEOX: dict[str, Any] = {"norm": "layernorm", "bias": True, "activation": "gelu", "num_kv_heads": 8}

# type: our settings, its own settings, its names of the layer's norms.
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "Gemma2": (
        {"norm_weight": "offset", "norm_placement": "sandwich", "embedding_scale": 32**0.5, "activation": "geglu"}
        | {"output_softcap": 3.0, "tie_embeddings": True, "norm_epsilon": 1e-6},
        {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None, "query_pre_attn_scalar": 4},
        {"attention_norm": "input_layernorm", "attention_output_norm": "post_attention_layernorm"}
        | {"mlp_norm": "pre_feedforward_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    ),
    "Exaone4": (
        {"norm_placement": "output", "qk_norm": True},
        {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rms_norm_eps": 1e-5},
        {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    ),
    "Olmo": ({"norm": "layernorm", "norm_weight": "none"}, {}, {}),
    "Granite": (
        {"residual_scale": 0.3, "embedding_scale": 3.0, "output_scale": 0.25},
        {"residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_scaling": 4.0, "attention_multiplier": 0.5}
        | {"rms_norm_eps": 1e-5},
        {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    ),
    "Phi": (
        NEOX | {"parallel_residual": "one_norm", "output_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"attention_norm": "input_layernorm"},
    ),
    "GPTNeoX": (
        NEOX | {"parallel_residual": "two_norms", "activation": "gelu_exact"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
        {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    ),
}
"""At a head dimension of 4. Together they have every kind of norm, its placements, parallel layers, and all factors."""


def network_of(kind: str, config: Config) -> Any:
    model = config.model
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=mlp_size(model),
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=head_dim(model),
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="eager",
        pad_token_id=None,
        **TYPES[kind][1],
    )
    return shaken(lambda: getattr(transformers, f"{kind}ForCausalLM")(theirs))


class Names:
    """transformers' tensors by our names of parts."""

    def __init__(self, kind: str, named: Named, config: Config) -> None:
        self.kind, self.config, self.model = kind, config, config.model
        self.named = {name.removeprefix("model.").removeprefix("gpt_neox."): array for name, array in named.items()}

    def stacked(self, name: str) -> np.ndarray:
        return np.stack([self.named[f"layers.{i}.{name}"] for i in range(self.model.num_layers)])

    def norm(self, name: str, of_layers: bool = True) -> dict[str, np.ndarray]:
        vectors = dict(zip(norm_vectors(self.model), ("weight", "bias"), strict=False))
        read = self.stacked if of_layers else self.named.__getitem__
        return {ours: read(f"{name}.{theirs}") for ours, theirs in vectors.items()}

    def linear(self, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[str, np.ndarray]:
        """[layers, outputs, inputs] under our shape, with a bias where there is one."""
        weight = np.moveaxis(self.stacked(f"{name}.weight"), 1, 2).reshape(-1, *inputs, *outputs)
        has_bias = f"layers.0.{name}.bias" in self.named
        return {"weight": weight} | ({"bias": self.stacked(f"{name}.bias").reshape(-1, *outputs)} if has_bias else {})

    def joined(self, parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        return {key: np.stack([part[key] for part in parts], 2 if key == "weight" else 1) for key in parts[0]}

    def attention(self) -> dict[str, Any]:
        model, hidden = self.model, (self.model.hidden_size,)
        heads, kv_heads = (model.num_heads, head_dim(model)), (model.num_kv_heads, head_dim(model))
        if self.kind == "GPTNeoX":
            fused = self.linear("attention.query_key_value", hidden, (heads[0], 3, heads[1]))
            qkv = {name: np.swapaxes(array, -3, -2) for name, array in fused.items()}
            return {"qkv": qkv, "output": self.linear("attention.dense", heads, hidden)}
        query = self.linear("self_attn.q_proj", hidden, heads)
        key_value = self.joined([self.linear(f"self_attn.{name}_proj", hidden, kv_heads) for name in "kv"])
        parts: dict[str, Any] = {"qkv": {"query": query, "key_value": key_value}}
        if heads == kv_heads:
            parts["qkv"] = self.joined([self.linear(f"self_attn.{name}_proj", hidden, heads) for name in "qkv"])
        output = "dense" if self.kind == "Phi" else "o_proj"
        normed = ("query", "key") if model.qk_norm else ()
        norms = {f"{name}_norm": {"scale": self.stacked(f"self_attn.{name[0]}_norm.weight")} for name in normed}
        return parts | {"output": self.linear(f"self_attn.{output}", heads, hidden)} | norms

    def mlp(self) -> dict[str, Any]:
        hidden, inner = (self.model.hidden_size,), (mlp_size(self.model),)
        if self.model.activation in GATED:
            up = self.joined([self.linear(f"mlp.{name}_proj", hidden, inner) for name in ("gate", "up")])
            return {"up": up, "down": self.linear("mlp.down_proj", inner, hidden)}
        up, down = ("mlp.fc1", "mlp.fc2") if self.kind == "Phi" else ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        return {"up": self.linear(up, hidden, inner), "down": self.linear(down, inner, hidden)}

    def model_tree(self) -> dict[str, Any]:
        config = self.model
        layer = {ours: self.norm(theirs) for ours, theirs in TYPES[self.kind][2].items()}
        if config.norm_weight == "none":
            layer = {}
        final = {"Phi": "final_layernorm", "GPTNeoX": "final_layer_norm"}.get(self.kind, "norm")
        tree = {
            "embedding": self.table("embed_in.weight" if self.kind == "GPTNeoX" else "embed_tokens.weight"),
            "stack": {"layers": {**layer, "attention": self.attention(), "mlp": self.mlp()}},
            "final_norm": self.norm(final, of_layers=False),
        }
        tree |= {} if config.norm_weight != "none" else {"final_norm": {}}
        tree |= {} if config.tie_embeddings else {"output": self.table("lm_head.weight")}
        tree |= {"output_bias": self.table("lm_head.bias")} if config.output_bias else {}
        return {name: below for name, below in tree.items() if not isinstance(below, dict) or below}

    def table(self, name: str) -> np.ndarray:
        return padded(self.config, self.named[name])


@pytest.mark.torch
@pytest.mark.parametrize("kind", TYPES)
def test_logits_loss_and_gradients(kind: str) -> None:
    """On a mesh with split sequences."""
    values: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **LLAMA, **TYPES[kind][0]}
    config = tiny_config(mesh="2x4", sequence_parallel=True, **values)
    as_ours = lambda named: Names(kind, named, config).model_tree()  # noqa: E731
    assert_next_token_parity(network_of(kind, config), config, "2x4", as_ours, 2e-5)
