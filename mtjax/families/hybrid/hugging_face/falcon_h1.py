"""transformers' `falcon_h1`: attention and Mamba-2 side by side, then an MLP, with factors of many products."""

import math
from typing import Any

from mtjax.config import Model
from mtjax.config.layer_pattern import SIDE_BY_SIDE, shortened_pattern
from mtjax.config.sizes import head_dim
from mtjax.config.ssm import letters_of, ssm_heads
from mtjax.convert.model_types.decoder import HEAD_DIM, NO_BIASES, ROPE, SWIGLU, decoder, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    always,
    check_factor,
    fields,
    inverse,
    unused,
)
from mtjax.errors import UserError
from mtjax.families.hybrid.hugging_face.hybrid import LIMIT, halved, rms_norm
from mtjax.families.hybrid.hugging_face.hybrid_rows import hybrid_rows


def _read_width(values: Json) -> int:
    """Returns the width of Mamba-2's heads together."""
    given = values["mamba_d_ssm"]
    check_factor(values, "mamba_expand")
    return values["mamba_expand"] * values["hidden_size"] if given is None else given


def _read_sizes(values: Json) -> Settings:
    inner, count, each = _read_width(values), values["mamba_n_heads"], values["mamba_d_head"]
    each = inner // count if each == "auto" else each
    if count * each != inner:
        raise UserError(f"mamba_n_heads {count} x mamba_d_head {each} is not mamba_d_ssm {inner}")
    return {"ssm_heads": count, "ssm_head_dim": each}


def _write_sizes(model: Model) -> Json:
    count, each = ssm_heads(model), model.ssm_head_dim
    return {"mamba_d_ssm": count * each, "mamba_n_heads": count, "mamba_d_head": each}


def _factor(values: Json, key: str) -> float:
    check_factor(values, key)
    return 1.0 if values[key] is None else float(values[key])


def _read_attention(values: Json) -> Settings:
    """Reads the factors of attention's input, keys and output: of its input, query, key and value are multiples."""
    before, keys = _factor(values, "attention_in_multiplier"), _factor(values, "key_multiplier")
    width = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    # attention_in_multiplier scales queries and keys, so scores have it twice.
    scores = before * before * keys
    return {
        "attention_scale": None if scores == 1 else scores * width**-0.5,
        # attention_in_multiplier scales values, too, in which the output is linear.
        "attention_output_scale": before * _factor(values, "attention_out_multiplier"),
    }


def _write_attention(model: Model) -> Json:
    scale, root = model.attention_scale, head_dim(model) ** 0.5
    keys = 1.0 if scale is None else inverse(lambda key: key * head_dim(model) ** -0.5, scale, scale * root)
    return {
        # Always 1: `_read_attention` multiplies it into the other factors.
        "attention_in_multiplier": 1.0,
        "key_multiplier": keys,
        "attention_out_multiplier": model.attention_output_scale,
    }


def _read_state_space(values: Json) -> Settings:
    """Reads the factors of Mamba-2's input, of the parts of its first product, and of its output."""
    parts, before = values["ssm_multipliers"] or [1.0] * 5, _factor(values, "ssm_in_multiplier")
    scales = [before * part for part in parts]
    given = None if all(scale == 1 for scale in scales) else tuple(scales)
    return {"ssm_scales": given, "ssm_output_scale": _factor(values, "ssm_out_multiplier")}


def _write_state_space(model: Model) -> Json:
    return {
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(model.ssm_scales or [1.0] * 5),
        "ssm_out_multiplier": model.ssm_output_scale,
    }


def _read_norm(values: Json) -> Settings:
    if values["mamba_rms_norm"] and values["mamba_norm_before_gate"]:
        raise UserError("mamba_norm_before_gate is true with mamba_rms_norm true, and must be false")
    return {"ssm_norm": bool(values["mamba_rms_norm"])}


FACTORS = (
    fields(embedding_scale="embedding_multiplier", output_scale="lm_head_multiplier"),
    ConfigKeys(
        ("attention_in_multiplier", "key_multiplier", "attention_out_multiplier", "head_dim", "num_attention_heads"),
        _read_attention,
        _write_attention,
    ),
    ConfigKeys(
        ("ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier"),
        _read_state_space,
        _write_state_space,
        {"ssm_scales": "ssm_multipliers"},
    ),
    ConfigKeys(
        ("mlp_multipliers",),
        lambda values: dict(
            zip(("mlp_gate_scale", "mlp_output_scale"), values["mlp_multipliers"] or [1.0, 1.0], strict=True)
        ),
        lambda model: {"mlp_multipliers": [model.mlp_gate_scale, model.mlp_output_scale]},
        dict.fromkeys(("mlp_gate_scale", "mlp_output_scale"), "mlp_multipliers"),
    ),
)
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "time_step_limit": (0.0, math.inf),
    "ssm_multipliers": None,
    "mlp_multipliers": None,
    **dict.fromkeys(
        (
            *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"),
            *("attention_in_multiplier", "attention_out_multiplier", "ssm_out_multiplier"),
        ),
        1.0,
    ),
}

FALCON_H1 = halved(
    decoder(
        "falcon_h1",
        "FalconH1",
        sizes(4096, 14_336, 32, 32, 8, 128_000, 8192) | DEFAULTS,
        size_fields(num_layers=""),
        HEAD_DIM,
        rms_norm("rms_norm_eps"),
        always(position="rope"),
        SWIGLU,
        ROPE,
        NO_BIASES,
        ConfigKeys(
            ("num_hidden_layers",),
            # H: attention and Mamba-2 side by side; each of transformers' layers is two here.
            lambda values: {"layer_pattern": shortened_pattern("H-" * values["num_hidden_layers"])},
            lambda model: {"num_hidden_layers": max(letters_of(model).count("H"), 1)},
        ),
        ConfigKeys(
            ("mamba_d_ssm", "mamba_n_heads", "mamba_d_head", "mamba_expand"),
            _read_sizes,
            _write_sizes,
            {"ssm_heads": "mamba_n_heads", "ssm_head_dim": "mamba_d_head"},
        ),
        fields(ssm_state="mamba_d_state", ssm_groups="mamba_n_groups", ssm_conv="mamba_d_conv"),
        ConfigKeys(
            ("mamba_rms_norm", "mamba_norm_before_gate"),
            _read_norm,
            lambda model: {"mamba_rms_norm": model.ssm_norm, "mamba_norm_before_gate": False},
        ),
        LIMIT,
        *FACTORS,
        unused("num_logits_to_keep", "mamba_use_mlp", "attn_layer_indices", "mlp_expansion_factor"),
        names=ModuleNames(final_norm="final_layernorm", mlp="feed_forward", mlp_norm="pre_ff_layernorm"),
        rows=hybrid_rows("mamba", stack=SIDE_BY_SIDE),
        only={
            "hidden_act": ("silu", "swish"),  # that of the convolutions, too
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "projectors_bias": (False,),
            "mamba_conv_bias": (True,),
            "mamba_proj_bias": (False,),
        },
        classifies=False,
    )
)
