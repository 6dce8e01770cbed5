"""Kinds of attention that decoders have, each as transformers computes it in place of Llama's: logits, loss and every
gradient."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from mtjax.config import Config, replace
from mtjax.config.sizes import head_dim, num_kv_heads
from tests.parity.compare import Named, assert_next_token_parity, shaken
from tests.parity.test_llama import TOLERANCE, as_llama, llama_config, llama_of

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)


@dataclass(frozen=True)
class Kind:
    """A type's attention and the settings that make ours the same."""

    name: str
    settings: dict[str, Any]
    theirs: dict[str, Any] = field(default_factory=dict)
    """Of the type's config, besides sizes."""
    norms: tuple[str, str] = ("q_norm", "k_norm")


BETA = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.7, "original_max_position_embeddings": 5}
KINDS = {
    "Gemma2": Kind(
        "gemma2.Gemma2",
        {"attention_scale": 20**-0.5, "attention_softcap": 2.0},
        {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "layer_types": ["full_attention"] * 2},
    ),
    "GptOss": Kind(
        "gpt_oss.GptOss",
        {"attention_sinks": True, "attention_bias": "all"},
        {"attention_bias": True, "layer_types": ["full_attention"] * 2},
    ),
    "Olmoe": Kind("olmoe.Olmoe", {"qk_norm": True, "qk_norm_scope": "width", "qkv_clip": 0.8}, {"clip_qkv": 0.8}),
    "StableLm": Kind(
        "stablelm.StableLm",
        {"qk_norm": True, "qk_norm_scope": "each_head", "qk_norm_kind": "layernorm", "attention_bias": "qkv"},
        {"use_qkv_bias": True, "qk_layernorm": True, "rope_parameters": {"partial_rotary_factor": 1.0}},
        ("q_layernorm", "k_layernorm"),
    ),
    "Phi": Kind(
        "phi.Phi",
        {"qk_norm": True, "qk_norm_kind": "layernorm", "qk_norm_bias": True, "attention_bias": "all"},
        {"qk_layernorm": True, "rope_parameters": {"partial_rotary_factor": 1.0}},
        ("q_layernorm", "k_layernorm"),
    ),
    "HunYuan": Kind(
        "hunyuan_v1_dense.HunYuanDenseV1",
        {"qk_norm": True, "qk_norm_after_rope": True},
        norms=("query_layernorm", "key_layernorm"),
    ),
    "Ministral3": Kind(
        "ministral3.Ministral3",
        {"attention_scale_beta": 0.7, "rope_original_length": 5},
        {"rope_parameters": BETA},
    ),
}


def network_of(kind: Kind, config: Config) -> Any:
    """A Llama of transformers with another type's attention."""
    model, (module, prefix) = config.model, kind.name.split(".")
    sizes = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": num_kv_heads(model),
        "num_hidden_layers": model.num_layers,
        "head_dim": head_dim(model),
        "rms_norm_eps": model.norm_epsilon,
        "layer_norm_eps": model.norm_epsilon,
        "attention_dropout": 0.0,
    }
    theirs = getattr(transformers, f"{prefix}Config")(attn_implementation="eager", **sizes, **kind.theirs)
    code = __import__(f"transformers.models.{module}.modeling_{module}", fromlist=["_"])
    make: Callable[..., Any] = getattr(code, f"{prefix}Attention")

    def grafted() -> Any:
        network = llama_of(replace(config, attention_bias="none", qk_norm=False))
        for number, layer in enumerate(network.model.layers):
            layer.self_attn = make(theirs, number)
            for name in kind.norms if model.qk_norm else ():
                for parameter in getattr(layer.self_attn, name).parameters():
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
            if hasattr(layer.self_attn, "sinks"):
                torch.nn.init.normal_(layer.self_attn.sinks)
            if module == "gpt_oss":  # its cosines and sines are not repeated for the second half of a head
                layer.self_attn.register_forward_pre_hook(halve_rotation, with_kwargs=True)
        return network

    return shaken(grafted)


def halve_rotation(_: Any, inputs: Any, named: dict[str, Any]) -> Any:
    rotation = tuple(a[..., : a.shape[-1] // 2] for a in named["position_embeddings"])
    return inputs, {**named, "position_embeddings": rotation}


def as_ours(kind: Kind, named: Named, config: Config) -> dict[str, Any]:
    """The tensors under our names; those of Llama's attention as `as_llama` gives them."""
    model = config.model
    found = as_llama(
        {name.replace("self_attn.dense", "self_attn.o_proj"): a for name, a in named.items()},
        replace(config, qk_norm=False),
    )
    attention = found["stack"]["layers"]["attention"]

    def stacked(name: str) -> np.ndarray:
        return np.stack([named[f"model.layers.{i}.self_attn.{name}"] for i in range(model.num_layers)])

    if model.attention_sinks:
        attention["sinks"] = stacked("sinks")
    for ours, theirs, heads in (
        zip(("query", "key"), kind.norms, (model.num_heads, num_kv_heads(model)), strict=True) if model.qk_norm else ()
    ):
        if model.qk_norm_scope == "each_head":
            vectors = {"weight": np.stack([stacked(f"{theirs}.norms.{head}.weight") for head in range(heads)], 1)}
        else:
            vectors = {name: stacked(f"{theirs}.{name}") for name in ("weight", "bias")[: 1 + model.qk_norm_bias]}
        shape = (-1, head_dim(model)) if model.qk_norm_scope == "head" else (model.num_layers, -1, head_dim(model))
        attention[f"{ours}_norm"] = {
            {"weight": "scale", "bias": "bias"}[name]: vector.reshape(shape) for name, vector in vectors.items()
        }
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_transformers(kind: str) -> None:
    """With 2 key heads, on 4 ways each is on two ranks."""
    of = KINDS[kind]
    config = llama_config(num_kv_heads=2, bias=False, **of.settings)
    network = network_of(of, config)
    assert_next_token_parity(network, config, "2x4", lambda named: as_ours(of, named, config), TOLERANCE)
