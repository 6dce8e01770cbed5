"""transformers' `llama`: Llama 1, 2 and 3, and all models in the same format."""

from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import head_dim, mlp_size, num_kv_heads
from mtjax.convert.families.family import Family, Field, Json, head_json, head_settings
from mtjax.convert.families.rows import attention, decoder, linear, norm, stacked
from mtjax.convert.table import Row, Table
from mtjax.errors import UserError
from mtjax.theory.families.decoder import DENSE

LAYERS, BLOCK = "stack.layers", "model.layers.{layer}"

ATTENTION = (
    *norm(f"{LAYERS}.attention_norm", f"{BLOCK}.input_layernorm"),
    *attention(f"{LAYERS}.attention", *(f"{BLOCK}.self_attn.{x}_proj" for x in "qkv")),
    *linear(f"{LAYERS}.attention.output", f"{BLOCK}.self_attn.o_proj", "heads*head_dim", "embed"),
)
MLP = (
    *norm(f"{LAYERS}.mlp_norm", f"{BLOCK}.post_attention_layernorm"),
    *stacked(f"{LAYERS}.mlp.up", "gate", (f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj"), "embed", "mlp"),
    *linear(f"{LAYERS}.mlp.down", f"{BLOCK}.mlp.down_proj", "mlp", "embed"),
)


def first_layers(*rows: Row) -> tuple[Row, ...]:
    """Returns the rows of the first (dense) layers in a model with experts."""
    return tuple(replace(of, ours=of.ours.replace(LAYERS, f"{DENSE}.layers")) for of in rows)


FREQUENCIES = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def table(name: str, *layer: Row) -> Table:
    """Returns the table of a family with these rows in a layer, and otherwise Llama's structure."""
    return decoder(name, "model.", "embed_tokens.weight", layer, "norm", ignored=FREQUENCIES)


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
)
BIAS = Field("bias", "attention_bias", False)

ROPE = {
    "rope_factor": "factor",
    "rope_low_frequency_factor": "low_freq_factor",
    "rope_high_frequency_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
}
"""mtjax's settings of RoPE scaling -> keys of config.json."""
OPTIONAL = ("rope_beta_fast", "rope_beta_slow", "rope_attention_factor")
"""Settings that a config may omit; mtjax's defaults are transformers'."""
SCALED_BY = {
    "none": (),
    "linear": ("rope_factor",),
    "llama3": tuple(name for name in ROPE if name not in OPTIONAL),
    "yarn": ("rope_factor", "rope_original_length", *OPTIONAL),
}
"""Kinds of scaling -> the settings of each."""
NOT_YARN = ("mscale", "mscale_all_dim", "truncate")
"""Keys of variants of YaRN that are not supported."""


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    if config.get("mlp_bias", False) != config.get("attention_bias", False):
        raise UserError("attention_bias and mlp_bias differ, but mtjax has one setting, bias, for both")
    return {"mlp_size": config.get("intermediate_size", 11008), **read_decoder(config), **head_settings(config)}


def read_decoder(config: Json, theta: float = 10_000.0) -> dict[str, Any]:
    """Returns mtjax's settings that Llama and related families have in common; `theta` is the default RoPE base."""
    return {
        "family": "llama",
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "hidden_dropout": 0.0,
        **_read_rope(config, theta),
    }


def _read_rope(config: Json, default: float) -> dict[str, Any]:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

    Raises:
      UserError: the kind of scaling, or one of its settings, is not supported.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if kind not in SCALED_BY:
        raise UserError(
            f"rope_type is {kind!r}, but must be one of default, {', '.join(k for k in SCALED_BY if k != 'none')}"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", default))
    if kind == "yarn" and (other := [key for key in NOT_YARN if rope.get(key) not in (None, key == "truncate")]):
        raise UserError(f"YaRN (rope_type yarn) has {' and '.join(other)}, which mtjax does not support")
    given = [name for name in SCALED_BY[kind] if name not in OPTIONAL or rope.get(ROPE[name]) is not None]
    scaling = {ours: rope[ROPE[ours]] for ours in given}
    return {"rope_theta": float(theta), "rope_scaling": kind, **scaling}


def _write(model: Model) -> dict[str, Any]:
    return {**head_json(model, "Llama", ARCHITECTURE), "mlp_bias": model.bias, **write_decoder(model)}


def write_decoder(model: Model) -> dict[str, Any]:
    """Returns the keys of config.json that Llama and related families have in common."""
    kind = model.rope_scaling
    scaling = {ROPE[ours]: getattr(model, ours) for ours in SCALED_BY[kind]}
    rope = {key: value for key, value in scaling.items() if value is not None}
    rope |= {"rope_type": "default" if kind == "none" else kind}
    return {
        "hidden_act": "silu",
        "num_key_value_heads": num_kv_heads(model),
        "head_dim": head_dim(model),
        "intermediate_size": mlp_size(model),
        # The keys of both transformers 4 and 5.
        "rope_theta": model.rope_theta,
        "rope_scaling": None if kind == "none" else rope,
        "rope_parameters": {"rope_theta": model.rope_theta, **rope},
    }


LLAMA = Family(
    model_type="llama",
    architecture=ARCHITECTURE,
    table=table("llama", *ATTENTION, *MLP),
    fields=(*FIELDS, BIAS),
    read=_read,
    write=_write,
    only={"hidden_act": ("silu", "swish")},
)
