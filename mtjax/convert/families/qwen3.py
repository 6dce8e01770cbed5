"""transformers' `qwen3` and `qwen3_moe`: Llama with QK-norm, and with experts (arXiv 2505.09388)."""

from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import dense_layers, dense_settings, expert_size, head_dim
from mtjax.convert.families.family import Family, Field, Json, head_json, head_settings
from mtjax.convert.families.llama import (
    ATTENTION,
    BLOCK,
    FIELDS,
    LAYERS,
    MLP,
    first_layers,
    read_decoder,
    table,
    write_decoder,
)
from mtjax.convert.families.rows import experts, norm, row
from mtjax.errors import UserError

QK_NORMS = tuple(
    row(f"{LAYERS}.attention.{ours}_norm.scale", f"{BLOCK}.self_attn.{theirs}_norm.weight", "head_dim")
    for ours, theirs in (("query", "q"), ("key", "k"))
)
EXPERTS = (
    *norm(f"{LAYERS}.experts_norm", f"{BLOCK}.post_attention_layernorm"),
    row(f"{LAYERS}.experts.router.weight", f"{BLOCK}.mlp.gate.weight", "routes embed"),
    *experts(f"{LAYERS}.experts", f"{BLOCK}.mlp.experts.{{expert}}", "gate_proj", "up_proj", "down_proj"),
)
ONLY = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)}
"""Keys -> supported values; with attention_bias, Qwen3 has biases in query, key and value, but not in the output."""


def _read_common(config: Json, names: frozenset[str]) -> dict[str, Any]:
    return {**read_decoder(config), "mlp_size": config.get("intermediate_size"), "bias": False, "qk_norm": True}


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    return {**_read_common(config, names), "head_dim": config.get("head_dim", 128), **head_settings(config)}


def _read_experts(config: Json, names: frozenset[str]) -> dict[str, Any]:
    count = config.get("num_local_experts", config.get("num_experts", 128))
    return {**_read_common(config, names), "num_experts": count, **_dense(config)}


def _dense(config: Json) -> dict[str, int]:
    """Returns mtjax's settings of the dense layers.

    Every `decoder_sparse_step`-th layer, counted from 1, has experts, except for `mlp_only_layers`.

    Raises:
      UserError: the pattern is not supported.
    """
    layers, step = config.get("num_hidden_layers", FIELDS[0].default), config.get("decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or []
    dense = [i for i in range(layers) if i in without or (i + 1) % step]
    settings = dense_settings(dense, layers) if len(dense) < layers else None
    if settings is None:
        raise UserError(
            f"decoder_sparse_step {step} and mlp_only_layers {without} put experts in {layers - len(dense)} of {layers}"
            " layers, a pattern that mtjax does not support; supported: all layers, all after the first k, every N-th"
        )
    return settings


def _write_common(model: Model) -> dict[str, Any]:
    return {**write_decoder(model), "attention_bias": False, "use_sliding_window": False, "head_dim": head_dim(model)}


def _write(model: Model) -> dict[str, Any]:
    return {**_write_common(model), **head_json(model, "Qwen3", "Qwen3ForCausalLM")}


def _write_experts(model: Model) -> dict[str, Any]:
    # transformers 5 renamed num_experts to num_local_experts.
    count = {"num_experts": model.num_experts, "num_local_experts": model.num_experts}
    layers = {"decoder_sparse_step": 1, "mlp_only_layers": list(dense_layers(model))}
    return {**_write_common(model), **count, **layers, "moe_intermediate_size": expert_size(model)}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    table=table("qwen3", *ATTENTION, *QK_NORMS, *MLP),
    fields=FIELDS,
    read=_read,
    write=_write,
    only=ONLY,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    table=table("qwen3_moe", *ATTENTION, *QK_NORMS, *EXPERTS, *first_layers(*ATTENTION, *QK_NORMS, *MLP)),
    fields=(
        *FIELDS,
        Field("experts_top_k", "num_experts_per_tok", 8),
        Field("expert_size", "moe_intermediate_size", 768),
        Field("router_normalize", "norm_topk_prob", False),
    ),
    read=_read_experts,
    write=_write_experts,
    only=ONLY,
)
