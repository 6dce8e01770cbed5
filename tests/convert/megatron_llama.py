"""A Llama in Megatron-LM's layouts, written by hand from its published sources, of one given in transformers' names.

A rank's rows of query, key and value are group by group: the group's query heads, its key head, its value head. A
rank's rows of the first MLP layer are its part of the gate, then its part of the other projection.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

LEGACY = {
    "input_layernorm": "input_norm.weight",
    "qkv": "self_attention.query_key_value.weight",
    "o_proj": "self_attention.dense.weight",
    "post_attention_layernorm": "post_attention_norm.weight",
    "gate_up": "mlp.dense_h_to_4h.weight",
    "down_proj": "mlp.dense_4h_to_h.weight",
}
CORE = {
    "qkv": "self_attention.linear_qkv.weight",
    "o_proj": "self_attention.linear_proj.weight",
    "gate_up": "mlp.linear_fc1.weight",
    "down_proj": "mlp.linear_fc2.weight",
}
NAMES = {
    "legacy": LEGACY,
    "local": CORE
    | {"input_layernorm": "input_layernorm.weight", "post_attention_layernorm": "pre_mlp_layernorm.weight"},
    "transformer_engine": CORE
    | {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    },
}


def grouped_rows(query: np.ndarray, key: np.ndarray, value: np.ndarray, groups: int, rank: int, ranks: int) -> Any:
    """One rank's query_key_value; `groups` are of the whole model."""
    queries, keys, values = (np.split(part, groups) for part in (query, key, value))
    mine = range(rank * groups // ranks, (rank + 1) * groups // ranks)
    return np.concatenate([part for group in mine for part in (queries[group], keys[group], values[group])])


def gated_rows(gate: np.ndarray, up: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    return np.concatenate([np.split(gate, ranks)[rank], np.split(up, ranks)[rank]])


def layer(t: dict[str, np.ndarray], names: dict[str, str], groups: int, rank: int, ranks: int) -> dict[str, np.ndarray]:
    query, key, value = (t[f"self_attn.{x}_proj.weight"] for x in "qkv")
    found = {
        "input_layernorm": t["input_layernorm.weight"],
        "qkv": grouped_rows(query, key, value, groups, rank, ranks),
        "o_proj": np.split(t["self_attn.o_proj.weight"], ranks, 1)[rank],
        "post_attention_layernorm": t["post_attention_layernorm.weight"],
        "gate_up": gated_rows(t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"], rank, ranks),
        "down_proj": np.split(t["mlp.down_proj.weight"], ranks, 1)[rank],
    }
    return {names[name]: array for name, array in found.items()}


def arguments(config: dict[str, Any], impl: str, tensor: int, pipeline: int, rows: int) -> argparse.Namespace:
    """Of a transformers config, as its own loader of Llama sets them."""
    scaled = config.get("rope_scaling") or {}
    return argparse.Namespace(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        padded_vocab_size=rows,
        norm_epsilon=config["rms_norm_eps"],
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config["rope_theta"]),
        rotary_percent=1.0,
        use_rope_scaling=bool(scaled),
        rope_scaling_factor=scaled.get("factor", 8.0),
        bias_gelu_fusion=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        use_legacy_models=impl == "legacy",
    )


def stage_of(
    tensors: dict[str, np.ndarray], config: dict[str, Any], impl: str, place: tuple[int, int, int, int], rows: int
) -> dict[str, np.ndarray]:
    """The whole names and tensors of one rank of one stage; `place` is rank, ranks, stage, stages."""
    rank, ranks, stage, stages = place
    core = impl != "legacy"
    stack = "decoder" if core else "language_model.encoder"
    before = "" if core else "language_model."
    each = config["num_hidden_layers"] // stages
    found: dict[str, np.ndarray] = {}

    def words(name: str) -> np.ndarray:
        table = np.pad(tensors[name], [(0, rows - len(tensors[name])), (0, 0)])
        return np.split(table, ranks)[rank]

    if stage == 0:
        found[f"{before}embedding.word_embeddings.weight"] = words("model.embed_tokens.weight")
    for local in range(each):
        start = f"model.layers.{stage * each + local}."
        own = {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}
        for name, array in layer(own, NAMES[impl], config["num_key_value_heads"], rank, ranks).items():
            found[f"{stack}.layers.{local}.{name}"] = array
    if stage == stages - 1:
        found[f"{stack}.final_{'layernorm' if core else 'norm'}.weight"] = tensors["model.norm.weight"]
        if not config["tie_word_embeddings"]:
            found[f"{before}output_layer.weight"] = words("lm_head.weight")
        elif stages > 1:
            copy = "output_layer.weight" if core else "word_embeddings_for_head.weight"
            found[copy] = words("model.embed_tokens.weight")
    return found


def nested(found: dict[str, Any]) -> dict[str, Any]:
    """As the old code saves it: a module in a module, and whole names inside."""
    inner: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith("language_model."):
            _, part, rest = name.split(".", 2)
            module = inner.setdefault("language_model", {}).setdefault(part, {})
            if part == "embedding":
                word, rest = rest.split(".", 1)
                module = module.setdefault(word, {})
            module[rest] = value
        else:
            module, rest = name.split(".", 1)
            inner.setdefault(module, {})[rest] = value
    return inner


def write_llama(
    folder: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any],
    impl: str,
    split: tuple[int, int] = (1, 1),
    *,
    rows: int = 384,
    extra_state: bool = True,
) -> Path:
    """A Llama as `save_checkpoint` leaves it with --ckpt-format torch."""
    import io

    import torch

    iteration = folder / "iter_0000042"
    for rank in range(split[0]):
        for stage in range(split[1]):
            found = stage_of(tensors, config, impl, (rank, split[0], stage, split[1]), rows)
            model: dict[str, Any] = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in found.items()}
            if impl == "transformer_engine" and extra_state:
                model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = io.BytesIO(b"scales")
                model["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(rank, dtype=torch.uint8)
                model["output_layer._extra_state"] = None
            content = {
                "args": arguments(config, impl, *split, rows),
                "checkpoint_version": 3.0,
                "iteration": 42,
                "model": nested(model) if impl == "legacy" else model,
            }
            path = iteration / f"mp_rank_{rank:02}{f'_{stage:03}' if split[1] > 1 else ''}"
            path.mkdir(parents=True)
            torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("42")
    return folder
