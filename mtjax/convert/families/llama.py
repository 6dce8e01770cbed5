"""transformers' `llama`: Llama 1, 2 and 3, and all models in the same format."""

from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import head_dim, mlp_size, num_kv_heads
from mtjax.convert.families.family import Family, Field, Json, head_json, head_settings
from mtjax.convert.families.rows import attention, decoder, linear, norm, stacked
from mtjax.errors import UserError

LAYERS, BLOCK = "stack.layers", "model.layers.{layer}"

LAYER = (
    *norm(f"{LAYERS}.attention_norm", f"{BLOCK}.input_layernorm"),
    *attention(f"{LAYERS}.attention", *(f"{BLOCK}.self_attn.{x}_proj" for x in "qkv")),
    *linear(f"{LAYERS}.attention.output", f"{BLOCK}.self_attn.o_proj", "heads*head_dim", "embed"),
    *norm(f"{LAYERS}.mlp_norm", f"{BLOCK}.post_attention_layernorm"),
    *stacked(f"{LAYERS}.mlp.up", "gate", (f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"), "embed", "mlp"),
    *linear(f"{LAYERS}.mlp.down", f"{BLOCK}.mlp.down_proj", "mlp", "embed"),
)
FREQUENCIES = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
TABLE = decoder("llama", "model.", "embed_tokens.weight", LAYER, "norm", ignored=FREQUENCIES)

ARCHITECTURE = "LlamaForCausalLM"

FIELDS = (
    Field("num_layers", "num_hidden_layers", 32),
    Field("hidden_size", "hidden_size", 4096),
    Field("num_heads", "num_attention_heads", 32),
    Field("sequence_length", "max_position_embeddings", 2048),
    Field("vocab_size", "vocab_size", 32000),
    Field("norm_epsilon", "rms_norm_eps", 1e-6),
    Field("init_std", "initializer_range", 0.02),
    Field("attention_dropout", "attention_dropout", 0.0),
    Field("tie_embeddings", "tie_word_embeddings", False),
    Field("bias", "attention_bias", False),
)

ROPE = {
    "rope_factor": "factor",
    "rope_low_frequency_factor": "low_freq_factor",
    "rope_high_frequency_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
}
"""Our settings of RoPE's scaling, and their keys."""
SCALED_BY = {"none": (), "linear": ("rope_factor",), "llama3": tuple(ROPE)}
"""The kinds of scaling, and the settings that each has."""


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    if config.get("mlp_bias", False) != config.get("attention_bias", False):
        raise UserError("attention_bias and mlp_bias differ, and mtjax has one setting for both")
    return {
        "family": "llama",
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "mlp_size": config.get("intermediate_size", 11008),
        "hidden_dropout": 0.0,
        **_read_rope(config),
        **head_settings(config),
    }


def _read_rope(config: Json) -> dict[str, Any]:
    """From `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` (4)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if kind not in SCALED_BY:
        raise UserError(f"RoPE is scaled by {kind!r}, and mtjax knows {', '.join(SCALED_BY)}")
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    scaling = {ours: rope[ROPE[ours]] for ours in SCALED_BY[kind]}
    return {"rope_theta": float(theta), "rope_scaling": kind, **scaling}


def _write(model: Model) -> dict[str, Any]:
    kind = model.rope_scaling
    rope = {ROPE[ours]: getattr(model, ours) for ours in SCALED_BY[kind]}
    rope |= {"rope_type": "default" if kind == "none" else kind}
    return {
        **head_json(model, "Llama", ARCHITECTURE),
        "hidden_act": "silu",
        "mlp_bias": model.bias,
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": head_dim(model),
        "intermediate_size": mlp_size(model),
        # As both versions of transformers write it.
        "rope_theta": model.rope_theta,
        "rope_scaling": None if kind == "none" else rope,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
    }


LLAMA = Family(
    model_type="llama",
    architecture=ARCHITECTURE,
    table=TABLE,
    fields=FIELDS,
    read=_read,
    write=_write,
    only={"hidden_act": ("silu", "swish")},
)
