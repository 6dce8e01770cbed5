"""transformers' `dots1`: Qwen3's attention, and DeepSeek-V3's experts after the first layers (arXiv 2506.05767)."""

from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import expert_size, num_kv_heads
from mtjax.convert.families.family import Family, Field, Json
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
from mtjax.convert.families.qwen3 import EXPERTS, QK_NORMS
from mtjax.convert.families.rows import linear, row, stacked
from mtjax.errors import UserError

SHARED = f"{BLOCK}.mlp.shared_experts"
EXPERT_EXTRAS = (
    row(f"{LAYERS}.experts.router.bias", f"{BLOCK}.mlp.gate.e_score_correction_bias", "routes"),
    *stacked(f"{LAYERS}.experts.shared.up", "gate", (f"{SHARED}.gate_proj", f"{SHARED}.up_proj"), "embed", "mlp"),
    *linear(f"{LAYERS}.experts.shared.down", f"{SHARED}.down_proj", "mlp", "embed"),
)
DEFAULTS = {"num_layers": 62, "hidden_size": 4608, "vocab_size": 152_064}
FIXED = {"mlp_only_layers": ([], None), "moe_layer_freq": (1, None), "attention_bias": (False,)}
ROUTER = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
"""Keys of the code of the first versions, which have the same values in all published models."""


def _check_windows(config: Json) -> None:
    """Checks that no layer has sliding-window attention.

    Raises:
      UserError: one has.
    """
    layers = config.get("num_hidden_layers", DEFAULTS["num_layers"])
    has_windows = config.get("sliding_window", 4096) is not None and config.get("max_window_layers", 62) < layers
    kinds = config.get("layer_types") or (["sliding_attention"] if has_windows else [])
    if "sliding_attention" in kinds:
        raise UserError("some layers use sliding-window attention, which mtjax does not support")


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    """Returns mtjax's settings; the router is DeepSeek-V3's (sigmoid scores with a bias)."""
    _check_windows(config)
    size, shared = config.get("moe_intermediate_size", 1408), config.get("n_shared_experts")
    if not shared:
        raise UserError(f"n_shared_experts is {shared}, but must be 1 or more in a dots1")
    return {
        **read_decoder(config),
        "mlp_size": config.get("intermediate_size", 10_944),
        "bias": False,
        "qk_norm": True,
        "num_experts": config.get("n_routed_experts") or config["num_local_experts"],
        "experts_top_k": config["num_experts_per_tok"],
        "expert_size": size,
        "shared_expert_size": shared * size,
        "expert_groups": config.get("n_group") or 1,
        "expert_groups_top_k": config.get("topk_group") or 1,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_scale": float(config.get("routed_scaling_factor", 1.0)),
    }


def _write(model: Model) -> dict[str, Any]:
    """Returns the keys of config.json."""
    size = expert_size(model)
    return {
        **write_decoder(model),
        "num_key_value_heads": num_kv_heads(model),
        "attention_bias": False,
        "n_routed_experts": model.num_experts,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_top_k,
        "moe_intermediate_size": size,
        # At least 1, so that a model without shared experts fails the round trip in `Family.misfits`.
        "n_shared_experts": max(model.shared_expert_size // size, 1),
        "n_group": model.expert_groups,
        "topk_group": model.expert_groups_top_k,
        "routed_scaling_factor": model.router_scale,
        "sliding_window": None,
        "max_window_layers": model.num_layers,
        "layer_types": ["full_attention"] * model.num_layers,
    }


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    table=table("dots1", *ATTENTION, *QK_NORMS, *EXPERTS, *EXPERT_EXTRAS, *first_layers(*ATTENTION, *QK_NORMS, *MLP)),
    fields=(
        *(replace(field, default=DEFAULTS.get(field.ours, field.default)) for field in FIELDS),
        Field("first_dense_layers", "first_k_dense_replace", 0),
        Field("router_normalize", "norm_topk_prob", False),
    ),
    read=_read,
    write=_write,
    only={"hidden_act": ("silu", "swish"), **FIXED, **ROUTER},
)
