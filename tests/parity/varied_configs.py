"""Variations of a config.json: each key left out, null, or with other values; other names; keys of other types."""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

Json = dict[str, Any]

ACTIVATIONS = ["gelu", "relu", "silu", "gelu_pytorch_tanh", "relu2", "quick_gelu"]
WORDS: Mapping[str, list[Any]] = {
    "scoring_func": ["softmax", "sigmoid"],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "position_embedding_type": ["rope", "absolute", "nope", "relative_key", None],
    "feed_forward_proj": ["relu", "gated-gelu", "gated-silu", "gelu"],
}
"""Keys whose values are words -> words that some type knows."""
OTHER_KIND = {
    "full_attention": "sliding_attention",
    "sliding_attention": "full_attention",
    "sparse": "dense",
    "dense": "sparse",
}
NOT_VARIED = {
    *("model_type", "architectures", "transformers_version", "_name_or_path", "id2label", "label2id", "problem_type"),
    *("dtype", "torch_dtype", "vocab_size", "return_dict", "output_hidden_states", "output_attentions", "auto_map"),
    *("attn_implementation", "_attn_implementation", "chunk_size_feed_forward", "tie_word_embeddings", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "attention_dropout", "initializer_range"),
}
"""Keys that other tests vary, or that do not describe the network."""
ROPES: list[Json] = [
    {"rope_type": "default", "rope_theta": 777.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "mscale": 0.5,
        "mscale_all_dim": 0.8,
    },
    {
        "full_attention": {"rope_type": "default", "rope_theta": 777.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 555.0},
    },
]
OLD_ROPES: list[Json] = [
    {"type": "linear", "factor": 3.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
]
"""As version 4 of transformers writes them."""
BESIDE_ROPE = {
    "rope_theta": 777.0,
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 777.0,
    "rope_local_base_freq": 333.0,
    "original_max_position_embeddings": 8,
    "max_position_embeddings": 12,
}
FOREIGN: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "bias", "attention_out_bias"),
            *("use_qk_norm", "qk_norm", "qk_layernorm", "use_sliding_window", "norm_topk_prob", "rope_interleave"),
            *("alibi", "is_causal", "use_bidirectional_attention", "use_parallel_residual", "parallel_residual"),
            *("add_cross_attention", "is_decoder", "scale_attn_weights"),
        ),
        True,
    ),
    **dict.fromkeys(
        (
            *("sliding_window", "attention_multiplier", "residual_multiplier", "embedding_multiplier"),
            *("logits_scaling", "logit_scale", "attn_logit_softcapping", "final_logit_softcapping"),
            *("query_pre_attn_scalar", "no_rope_layers", "no_rope_layer_interval", "sliding_window_pattern"),
            *("max_window_layers", "head_dim", "num_key_value_heads", "n_group", "topk_group"),
            *("routed_scaling_factor", "first_k_dense_replace", "n_shared_experts", "rotary_dim", "clip_qkv"),
            *("num_nextn_predict_layers", "embedding_scale", "num_experts", "num_local_experts"),
            *("n_routed_experts", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers"),
        ),
        3,
    ),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), "relu"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), 0.5),
    "layer_types": ["sliding_attention"] * 2,
}
"""Keys of other types, with values that change the network of a type that reads them."""


def other_values(key: str, value: Any) -> list[Any]:
    """Values of a key that are not this one."""
    if key.endswith(("act", "activation", "activation_function")) or value in ACTIVATIONS:
        return [name for name in ACTIVATIONS if name != value]
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 0, None] if value else [1, 2]
    if isinstance(value, float):
        return [value * 1.7 + 0.1, None]
    if isinstance(value, str):
        return [*(word for word in WORDS.get(key, []) if word != value), "x"]
    if value is None:
        return [1, 3, 0.5, True]
    return other_lists(value) if isinstance(value, list) else []


def other_lists(values: list[Any]) -> list[Any]:
    """Lists that are not this one, and null."""
    found: list[Any] = [None]
    if not values:
        return [*found, [0], [1]]
    if all(type(value) in (int, float) for value in values):
        found += [values[::-1], [value + 1 for value in values], []]
    elif all(isinstance(value, str) for value in values):
        found += [values[::-1], [OTHER_KIND.get(value, value) for value in values]]
        found += [[values[0]] * len(values), [values[-1]] * len(values)]
    return [other for other in found if other != values]


def varied(config: Json, aliases: Mapping[str, str]) -> Iterator[tuple[str, Json]]:
    """Yields variations with a description of each; `aliases` are other names of keys."""
    for key in set(config) - NOT_VARIED:
        yield from _of_key(config, (key,))
    for rope in ROPES:
        yield f"rope_parameters {json.dumps(rope)}", {**config, "rope_parameters": rope}
    plain = {key: value for key, value in config.items() if key != "rope_parameters"}
    for rope in OLD_ROPES:
        yield f"and rope_scaling {json.dumps(rope)}", {**config, "rope_scaling": rope}
        yield f"rope_scaling {json.dumps(rope)} alone", {**plain, "rope_scaling": rope, "rope_theta": 5000.0}
    for key, value in BESIDE_ROPE.items():
        yield f"and {key} {value}", {**config, key: value}
        yield f"{key} {value} without rope_parameters", {**plain, key: value}
    for other, key in aliases.items():
        without = {name: value for name, value in config.items() if name != key}
        for value in other_values(key, config.get(key))[:2]:
            yield f"{other} {value} beside {key}", {**config, other: value}
            yield f"{other} {value} without {key}", {**without, other: value}
    for key, value in FOREIGN.items():
        if key not in config:
            yield f"new {key} {value}", {**config, key: value}


def _of_key(config: Json, path: tuple[str, ...]) -> Iterator[tuple[str, Json]]:
    """Yields the variations of a key, and of the keys of an object below it."""

    def parent(copied: Json) -> Json:
        for name in path[:-1]:
            copied = copied[name]
        return copied

    name, key = ".".join(path), path[-1]
    value = parent(config)[key]
    left_out = copy.deepcopy(config)
    del parent(left_out)[key]
    yield f"without {name}", left_out
    if isinstance(value, dict):
        for below in value:
            yield from _of_key(config, (*path, below))
    for other in [None] if isinstance(value, dict) else other_values(key, value):
        copied = copy.deepcopy(config)
        parent(copied)[key] = other
        yield f"{name} {other!r}", copied
