"""transformers' `mamba2`, `bamba` and `granitemoehybrid`: Mamba-2 beside attention, MLPs and experts."""

import math
from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.layer_pattern import shortened_pattern
from mtjax.config.sizes import mlp_size
from mtjax.config.ssm import letters_of, ssm_heads
from mtjax.convert.model_types.decoder import ROPE, SWIGLU, decoder, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json, ModelType
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    all_named,
    always,
    biases,
    check_factor,
    fields,
    unused,
)
from mtjax.convert.model_types.rope import rope
from mtjax.convert.table import Row
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.experts import GRANITE_NAMES, SAME_SIZE, TOP_K
from mtjax.families.gpt.hugging_face.granite import shared_rows
from mtjax.families.gpt.hugging_face.llama import GRANITE_SIZES, MULTIPLIERS
from mtjax.families.hybrid.hugging_face.hybrid_rows import hybrid_rows

ATTENTION, STATE_SPACE = "full_attention", "linear_attention"
"""transformers' kinds of layers, besides `mlp` and `moe`."""
# Names of transformers 4, too: "attention" and "mamba".
_LETTERS = {"attention": "*", ATTENTION: "*", "mamba": "M", STATE_SPACE: "M", "mlp": "-", "moe": "E"}
KINDS = {"*": ATTENTION, "M": STATE_SPACE, "-": "mlp", "E": "moe"}


def read_types(kinds: Any, key: str) -> str:
    """Returns the letters of transformers' kinds of layers."""
    if wrong := sorted({str(kind) for kind in kinds} - set(_LETTERS)):
        raise UserError(f"{key} has {', '.join(wrong)}, but must have {', '.join(_LETTERS)}")
    return "".join(_LETTERS[kind] for kind in kinds)


NO_FLOOR = 1e-30
"""A minimum of dt without effect: transformers takes the logarithm of time_step_min."""


def _floor(values: Json) -> Settings:
    """Reads the limits of dt, of which the upper one must be infinite."""
    low, high = values["time_step_limit"] or (0.0, math.inf)
    if high not in (math.inf, {"__float__": "Infinity"}):  # the latter is how transformers 5 writes it
        raise UserError(f"time_step_limit is {values['time_step_limit']}, and must have no upper limit")
    return {"ssm_rate_floor": float(low)}


FLOOR = ConfigKeys(
    ("time_step_min",),
    lambda values: {"ssm_rate_floor": 0.0 if values["time_step_min"] <= NO_FLOOR else values["time_step_min"]},
    lambda model: {"time_step_min": model.ssm_rate_floor or NO_FLOOR},
    {"ssm_rate_floor": "time_step_min"},
)
LIMIT = ConfigKeys(
    ("time_step_limit",),
    _floor,
    lambda model: {"time_step_limit": [model.ssm_rate_floor, math.inf]},
    {"ssm_rate_floor": "time_step_limit"},
)


def _state_space(heads: str, width: str, expand: str, **keys: str) -> ConfigKeys:
    """Returns the part of the sizes of Mamba-2 layers; `expand` is the key of their width over the hidden size."""
    others = fields(**keys)

    def read(values: Json) -> Settings:
        check_factor(values, expand)
        inner, count, each = values[expand] * values["hidden_size"], values[heads], values[width]
        each = inner // count if each == "auto" else each
        if count * each != inner:
            raise UserError(f"{heads} {count} x {width} {each} is not {expand} {values[expand]} x hidden_size")
        return {"ssm_heads": count, "ssm_head_dim": each, **others.read(values)}

    def write(model: Model) -> Json:
        count, each = ssm_heads(model), model.ssm_head_dim
        # Rounded, so that a model with another ratio fails the round trip in `ModelType.misfits`.
        ratio = max(1, count * each // model.hidden_size)
        return {heads: count, width: each, expand: ratio, **others.write(model)}

    named = {"ssm_heads": heads, "ssm_head_dim": width, **others.named}
    return ConfigKeys((heads, width, expand, *others.keys), read, write, named)


def rms_norm(key: str) -> ConfigKeys:
    """Returns the part of a hybrid model's norms, with the key of their epsilon."""
    defaults = {"family": "hybrid", "norm": "rmsnorm", "hidden_dropout": 0.0}
    return ConfigKeys(
        (key,),
        lambda values: {**defaults, "norm_epsilon": values[key]},
        lambda model: {key: model.norm_epsilon},
        {"norm_epsilon": key},
    )


INITIAL = unused("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual")
"""Keys of initial values."""

MAMBA2 = decoder(
    "mamba2",
    "Mamba2",
    {
        "num_heads": 128,
        "head_dim": 64,
        "vocab_size": 32_768,
        "hidden_size": 4096,
        "state_size": 128,
        "num_hidden_layers": 64,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "initializer_range": 0.1,
        "time_step_limit": None,
        "tie_word_embeddings": False,
    },
    size_fields(num_layers="", num_heads="", num_kv_heads="", mlp_size="", sequence_length="", attention_dropout=""),
    rms_norm("layer_norm_epsilon"),
    # config.json has no length, which a recurrent state does not limit.
    always(position="none", bias=False, sequence_length=4096),
    ConfigKeys(
        ("num_hidden_layers",),
        lambda values: {"layer_pattern": shortened_pattern("M" * values["num_hidden_layers"])},
        lambda model: {"num_hidden_layers": model.num_layers},
    ),
    _state_space(
        *("num_heads", "head_dim", "expand"), ssm_state="state_size", ssm_groups="n_groups", ssm_conv="conv_kernel"
    ),
    LIMIT,
    INITIAL,
    unused("residual_in_fp32"),
    names=ModuleNames(prefix="backbone.", embedding="embeddings", final_norm="norm_f", attention_norm="norm"),
    rows=hybrid_rows("mixer"),
    only={
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "hidden_act": ("silu", "swish"),
        "norm_before_gate": (False,),
    },
    classifies=False,
)


def _pairs(mixers: str, feed_forward: str) -> str:
    """Returns the pattern of layers that have a mixer each, and an MLP or experts after it."""
    return shortened_pattern("".join(mixer + feed_forward for mixer in mixers))


def halved(family: ModelType) -> ModelType:
    """Returns a type whose layers are two of mtjax's."""
    return replace(family, table=replace(family.table, sublayers=2))


def _mixers(model: Model) -> str:
    """Returns the letters of the mixers; "" for a pattern that is not made of such pairs."""
    letters = letters_of(model)
    return letters[::2] if set(letters[::2]) <= set("M*") and len(set(letters[1::2])) == 1 else ""


def _read_bamba(values: Json) -> Settings:
    attends, count = values["attn_layer_indices"] or (), values["num_hidden_layers"]
    return {"layer_pattern": _pairs("".join("*" if i in attends else "M" for i in range(count)), "-")}


def _write_bamba(model: Model) -> Json:
    mixers = _mixers(model)
    attends = [i for i, letter in enumerate(mixers) if letter == "*"]
    # At least 1: a pattern that fits nothing gives a config that fails the round trip, not a division by zero.
    return {"num_hidden_layers": max(len(mixers), 1), "attn_layer_indices": attends or None}


_MAMBA_KEYS = {"ssm_state": "mamba_d_state", "ssm_groups": "mamba_n_groups", "ssm_conv": "mamba_d_conv"}
_MAMBA_SIZES = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "time_step_limit": None,
}
_MAMBA = (_state_space("mamba_n_heads", "mamba_d_head", "mamba_expand", **_MAMBA_KEYS), LIMIT)
_PAIRED = {"mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "hidden_act": ("silu", "swish")}

BAMBA = halved(
    decoder(
        "bamba",
        "Bamba",
        sizes(4096, 14_336, 32, 32, 8, 128_000, 262_144)
        | {"rms_norm_eps": 1e-5, "attn_layer_indices": None, "partial_rotary_factor": 0.5}
        | _MAMBA_SIZES,
        size_fields(num_layers=""),
        rms_norm("rms_norm_eps"),
        always(position="rope"),
        SWIGLU,
        rope(fraction="partial_rotary_factor"),
        biases("attention_bias", "mlp_bias"),
        ConfigKeys(("num_hidden_layers", "attn_layer_indices"), _read_bamba, _write_bamba),
        *_MAMBA,
        unused("num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb"),
        names=ModuleNames(final_norm="final_layernorm", mlp="feed_forward", mlp_norm="pre_ff_layernorm"),
        rows=hybrid_rows("mamba"),
        only=_PAIRED,
        classifies=False,
    )
)


def _read_granite(values: Json) -> Settings:
    kinds = values["layer_types"] or values["layers_block_type"] or [STATE_SPACE] * values["num_hidden_layers"]
    count, width = values["num_local_experts"], values["shared_intermediate_size"]
    pattern = {"layer_pattern": _pairs(read_types(kinds, "layer_types"), "E" if count else "-")}
    if not count:
        # Without experts the shared MLP is the only one, and its key has the width.
        return {**pattern, "mlp_size": width, "num_experts": 0}
    return {**pattern, "shared_expert_size": width, **TOP_K.read(values), **SAME_SIZE.read(values)}


def _write_granite(model: Model) -> Json:
    mixers = _mixers(model)
    written = {
        "layer_types": [KINDS[letter] for letter in mixers],
        "num_hidden_layers": max(len(mixers), 1),
        "shared_intermediate_size": model.shared_expert_size or mlp_size(model),
    }
    if not model.num_experts:
        return {**written, "num_local_experts": 0, "intermediate_size": mlp_size(model)}
    return {**written, **TOP_K.write(model), **SAME_SIZE.write(model)}


def _read_position(values: Json) -> Settings:
    return {"position": "none"} if values["position_embedding_type"] != "rope" else {**ROPE.read(values), **ROTARY}


ROTARY = {"position": "rope"}
_GRANITE_KEYS = (
    *("layer_types", "layers_block_type", "num_hidden_layers", "shared_intermediate_size", "num_local_experts"),
    *("num_experts_per_tok", "intermediate_size"),
)

_SHARED = dict.fromkeys(("mlp_size", "shared_expert_size"), "shared_intermediate_size")


def _granite_rows(names: ModuleNames) -> tuple[Row, ...]:
    """Returns the rows of experts and of the MLP beside them, which is the only one without experts."""
    return (*GRANITE_NAMES.mixture_rows(names), *shared_rows(names))


GRANITEMOEHYBRID = halved(
    decoder(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        GRANITE_SIZES
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "layer_types": None}
        | {"layers_block_type": None, "position_embedding_type": None}
        | _MAMBA_SIZES,
        size_fields(num_layers="", mlp_size=""),
        rms_norm("rms_norm_eps"),
        SWIGLU,
        ConfigKeys(
            ("position_embedding_type", *ROPE.keys),
            _read_position,
            lambda model: {
                "position_embedding_type": "rope" if model.position == "rope" else None,
                **(ROPE.write(model) if model.position == "rope" else {}),
            },
            ROPE.named,
        ),
        biases("attention_bias"),
        *MULTIPLIERS,
        ConfigKeys(_GRANITE_KEYS, _read_granite, _write_granite, {**all_named((TOP_K, SAME_SIZE)), **_SHARED}),
        *_MAMBA,
        names=ModuleNames(mlp="shared_mlp", gate_up="input_linear", down="output_linear"),
        rows=hybrid_rows("mamba", _granite_rows),
        only={**_PAIRED, "position_embedding_type": (None, "nope", "rope"), "normalization_function": ("rmsnorm",)},
        classifies=False,
    )
)
