"""Translation between the arguments in Megatron-LM's checkpoints and mtjax's model settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mtjax.config import Model
from mtjax.config.families import kind_of
from mtjax.config.sizes import attention_bias, embedding_width, head_dim, mlp_bias, mlp_size, num_kv_heads
from mtjax.convert.megatron_experts import EXPERTS, expert_misfits, expert_settings, has_experts, unread_experts
from mtjax.errors import UserError
from mtjax.families.hybrid.megatron_arguments import (
    ALLOWED,
    hybrid_arguments,
    hybrid_misfits,
    hybrid_settings,
    letters_in,
    unread_hybrid,
)
from mtjax.families.retro.megatron_arguments import is_retro, retro_arguments, retro_settings
from mtjax.migrate.megatron import SAVED_AS, default_of, supported

if TYPE_CHECKING:
    from mtjax.convert.megatron_tables import MegatronNames  # imports jax, for seconds

SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    name: values for name, values in supported().items() if not name.startswith(EXPERTS)
}
"""Arguments -> the values that mtjax supports."""
VOCAB_MULTIPLE: int = default_of("make_vocab_size_divisible_by")
"""Megatron pads the vocabulary to a multiple of this times the tensor parallel degree."""
LLAMA3 = {"rope_low_frequency_factor": 1.0, "rope_high_frequency_factor": 4.0, "rope_original_length": 8192}
"""Constants of Megatron's scaled RoPE, which has no arguments for them."""
ROPE_FACTOR: float = default_of("rope_scaling_factor")
# A constant here, as the table of arguments has the defaults of the current code.
LEGACY_ROPE_BASE = 10_000.0
"""RoPE base of the legacy models, which ignore `--rotary-base` and `--use-rope-scaling`."""


def model_settings(arguments: Mapping[str, Any], names: frozenset[str], source: str) -> dict[str, Any]:
    """Returns mtjax's model settings from Megatron's arguments and the names of the tensors.

    Raises:
      UserError: arguments are missing, or describe a model that is not supported (lists all reasons).
    """
    letters = letters_in(names)
    wrong = unsupported(arguments, is_core=any(name.startswith("decoder.layers.") for name in names), letters=letters)
    if wrong:
        raise UserError(f"{source}: the model can't be converted: {', '.join(wrong)}")
    # The names of a hybrid model's tensors say how many layers it has.
    needed = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")[bool(letters) :]
    missing = [name for name in needed if arguments.get(name) is None]
    if missing:
        raise UserError(f"{source} is missing {', '.join(missing)}: describe the model with --config FILE")
    return described(arguments, names, letters)


def unsupported(arguments: Mapping[str, Any], *, is_core: bool, letters: str = "") -> list[str]:
    """Returns the arguments with which mtjax does not support a model, each with its value.

    Args:
      arguments: Megatron's.
      is_core: whether the model is Megatron-Core's, not the legacy code's.
      letters: the letter of each layer of a hybrid model.
    """
    wrong = [
        f"{name} is {arguments[name]!r}"
        for key, values in SUPPORTED.items()
        if not (letters and key in ALLOWED)
        # A checkpoint has one of the two names, by the version of Megatron that saved it.
        for name in dict.fromkeys((key, SAVED_AS.get(key, key)))
        # A missing argument is newer than the version of Megatron that saved: the model can't have what it switches on.
        if name in arguments and _plain(arguments[name]) and arguments[name] not in values
    ]
    if letters:
        wrong += unread_hybrid(arguments, letters)
        arguments = {**arguments, "moe_layer_freq": 1}  # which the pattern replaces
    elif _position(arguments) is None:
        wrong.append("no position embeddings")
    if arguments.get("qk_layernorm") and arguments.get("normalization") != "RMSNorm":
        wrong.append("qk_layernorm is True without normalization RMSNorm")
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    # Megatron-Core applies both, one to frequencies and one to positions. Without RoPE it applies neither.
    if _position(arguments) == "rope" and arguments.get("use_rope_scaling") and factor not in (None, 1):
        wrong.append(f"rotary_seq_len_interpolation_factor is {factor!r} beside use_rope_scaling")
    if has_experts(arguments):
        wrong += (
            unread_experts(arguments) if is_core else [f"num_experts is {arguments['num_experts']} in the legacy code"]
        )
    return wrong


def described(arguments: Mapping[str, Any], names: frozenset[str], letters: str = "") -> dict[str, Any]:
    """Returns mtjax's model settings from arguments that `unsupported` has checked."""
    if letters:
        arguments = {**arguments, "moe_layer_freq": 1, "num_layers": len(letters)}
        arguments |= {} if "E" in letters else {"num_experts": None}
    position = _position(arguments)
    is_bert = any(name.startswith(("lm_head.", "binary_head.")) or ".pooler." in name for name in names)
    # num_query_groups has a default even without group_query_attention.
    groups = arguments.get("num_query_groups") if arguments.get("group_query_attention") else None
    settings = {
        "family": "bert" if is_bert else "llama" if _is_llama(arguments) else "gpt",
        "num_layers": arguments["num_layers"],
        "hidden_size": arguments["hidden_size"],
        "num_heads": arguments["num_attention_heads"],
        "num_kv_heads": groups,
        "head_dim": arguments.get("kv_channels"),
        "mlp_size": arguments.get("ffn_hidden_size"),
        # Not seq_length: learned positions have as many rows as this says.
        "sequence_length": arguments["max_position_embeddings"],
        "norm": "rmsnorm" if arguments.get("normalization") == "RMSNorm" else "layernorm",
        "norm_epsilon": _number(arguments, "norm_epsilon", "layernorm_epsilon"),
        "activation": _activation(arguments),
        "bias": bool(arguments.get("add_bias_linear", True)),
        "attention_bias": "qkv" if _has_qkv_bias_alone(arguments) else "auto",
        "qk_norm": bool(arguments.get("qk_layernorm", False)),
        "tie_embeddings": not arguments.get("untie_embeddings_and_output_weights", False),
        "hidden_dropout": _number(arguments, "hidden_dropout"),
        "attention_dropout": _number(arguments, "attention_dropout"),
        "init_std": _number(arguments, "init_method_std"),
        "position": position,
    }
    settings |= _rope(arguments) if position == "rope" else {}
    settings |= expert_settings(arguments) if has_experts(arguments) else {}
    settings |= hybrid_settings(arguments, letters) if letters else {}
    settings |= retro_settings(arguments, names) if is_retro(names) else {}
    return settings | (_bert_settings(names) if is_bert else {})


def _position(arguments: Mapping[str, Any]) -> str | None:
    """Returns mtjax's setting `position`; the first versions with RoPE have use_rotary_position_embeddings instead."""
    if arguments.get("position_embedding_type") == "rope" or arguments.get("use_rotary_position_embeddings"):
        return "rope"
    return "learned" if arguments.get("add_position_embedding", True) in (True, None) else None


def _is_llama(arguments: Mapping[str, Any]) -> bool:
    # SwiGLU, RMS norm and RoPE: mtjax's family llama.
    is_gated, is_rms = arguments.get("swiglu"), arguments.get("normalization") == "RMSNorm"
    return bool(is_gated and is_rms and _position(arguments) == "rope")


def _has_qkv_bias_alone(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments.get("add_qkv_bias")) and not arguments.get("add_bias_linear", True)


def _activation(arguments: Mapping[str, Any]) -> str:
    """Returns mtjax's setting `activation`."""
    if arguments.get("swiglu"):
        return "swiglu"
    if arguments.get("squared_relu"):
        return "relu2"
    # Megatron's fused GELU is the tanh approximation; it includes a bias, so a model without biases does not use it.
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    return "gelu" if fused or arguments.get("openai_gelu", False) else "gelu_exact"


def _rope(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mtjax's settings of RoPE."""
    settings: dict[str, Any] = {"rope_theta": float(arguments.get("rotary_base") or LEGACY_ROPE_BASE)}
    if (fraction := float(arguments.get("rotary_percent") or 1.0)) != 1:
        settings["rope_fraction"] = fraction
    factor = arguments.get("rotary_seq_len_interpolation_factor")
    if arguments.get("use_rope_scaling"):
        scaled = _number(arguments, "rope_scaling_factor")
        return settings | {"rope_scaling": "llama3", "rope_factor": scaled, **LLAMA3}
    if factor not in (None, 1):
        return settings | {"rope_scaling": "linear", "rope_factor": float(factor)}
    return settings | {"rope_scaling": "none"}


def ignored_rope(model: Model, *, is_legacy: bool) -> str | None:
    """Returns a note on a RoPE argument that some versions of Megatron-LM accept and ignore; None if there is none."""
    if model.position != "rope" or model.layer_pattern:
        return None
    if is_legacy and (model.rope_theta != LEGACY_ROPE_BASE or model.rope_scaling == "llama3"):
        scaling, unscaled = "", ""
        if model.rope_scaling == "llama3":
            scaling, unscaled = " and the scaling of use_rope_scaling", ", unscaled"
        return (
            f"the model gets rotary_base {model.rope_theta:g}{scaling} from the arguments, which Megatron-LM's legacy "
            f"code ignores (it uses {LEGACY_ROPE_BASE:g}{unscaled}): if the legacy code trained these weights, "
            "describe the model with --config FILE"
        )
    if model.rope_scaling == "llama3" and model.rope_factor != ROPE_FACTOR:
        return (
            f"rope_scaling_factor is {model.rope_factor:g}, and Megatron-LM before its pull request 6306 (August 2026) "
            f"computes with {ROPE_FACTOR:g}, whatever is given"
        )
    return None


def _number(arguments: Mapping[str, Any], name: str, older: str = "") -> float:
    """Returns an argument, also by its older name, or Megatron's default if it is missing."""
    given = [value for value in (arguments.get(name), arguments.get(older)) if value is not None]
    return float(given[0] if given else default_of(name))


def _bert_settings(names: frozenset[str]) -> dict[str, Any]:
    return {
        # Megatron's BERT has its norms before the sublayers, unlike Google's.
        "norm_placement": "pre",
        "num_token_types": 2 if any("tokentype_embeddings" in name for name in names) else 0,
        "sentence_order": any(name.startswith("binary_head.") or ".pooler." in name for name in names),
    }


def _plain(value: Any) -> bool:
    """Returns whether a value was loaded; objects of Megatron's classes are not."""
    return value is None or isinstance(value, bool | int | float | str | tuple | list)


def arguments_of(
    model: Model, names: "MegatronNames", tensor: int, pipeline: int, dtype: str, vocab_rows: int
) -> dict[str, Any]:
    """Returns Megatron's arguments for an mtjax model.

    Raises:
      UserError: Megatron does not support the model (lists all reasons).
    """
    wrong = misfits(model, names)
    if wrong:
        model_of_core = "hybrid model" if model.layer_pattern else "GPT"
        kind = "Megatron-LM's legacy code does" if names.is_legacy else f"Megatron-Core's {model_of_core} does"
        raise UserError(f"{kind} not support {', '.join(wrong)}")
    return {
        **_sizes(model, vocab_rows),
        **_kinds(model, names),
        **_positions(model),
        **hybrid_arguments(model),
        **retro_arguments(model),
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "model_parallel_size": tensor,  # the name in versions before 3
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "fp16": dtype == "float16",
        "bf16": dtype == "bfloat16",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "data_parallel_random_init": False,
    }


def misfits(model: Model, names: "MegatronNames") -> list[str]:
    """Returns the settings of an mtjax model that an implementation of Megatron does not support."""
    is_bert = model.family == "bert"
    approximate = "activation gelu (the tanh approximation) without biases"
    tanh_without_bias = model.activation == "gelu" and not mlp_bias(model)
    biases = attention_bias(model), mlp_bias(model)
    positions = ("learned",) if is_bert else ("none", "rope") if model.layer_pattern else ("learned", "rope")
    activations = ("gelu", "gelu_exact") if is_bert else ("gelu", "gelu_exact", "swiglu", "relu2")
    wrong = {
        f"family {model.family}": kind_of(model) == "encoder-decoder" or (model.family == "retro" and names.is_legacy),
        f"head {model.head}": model.head != "language",
        "family bert; use --transformer-impl legacy": is_bert and not names.is_legacy,
        f"norm {model.norm} in a bert": is_bert and model.norm != "layernorm",
        f"position {model.position}": model.position not in positions,
        **dict.fromkeys(expert_misfits(model, names.is_legacy), True),
        f"kv_lora_rank {model.kv_lora_rank}": model.kv_lora_rank > 0,
        "qk_norm": model.qk_norm and (names.is_legacy or model.norm != "rmsnorm"),
        f"attention_bias {biases[0]} with mlp_bias {biases[1]}": (biases[0] == "all") != biases[1],
        **_decoder_misfits(model),
        f"activation {model.activation}": model.activation not in activations,
        f"{approximate}; use --transformer-impl legacy": tanh_without_bias and not names.is_legacy,
        f"num_kv_heads {num_kv_heads(model)} with num_heads {model.num_heads} in a bert": (
            is_bert and num_kv_heads(model) != model.num_heads
        ),
        f"num_token_types {model.num_token_types}": is_bert and model.num_token_types not in (0, 2),
        "bias false in a bert": is_bert and biases != ("all", True),
        f"norm_placement {model.norm_placement}": model.norm_placement != "pre",
        f"embedding_size {model.embedding_size}": embedding_width(model) != model.hidden_size,
        **(_rope_misfits(model, names) if model.position == "rope" else {}),
        **(hybrid_misfits(model, names.transformer_impl) if model.layer_pattern else {}),
    }
    return [what for what, holds in wrong.items() if holds]


def _decoder_misfits(model: Model) -> dict[str, bool]:
    """Returns descriptions of settings of attention and of layers that are not converted -> whether the model has
    them."""
    names = ("qkv_clip", "attention_scale", "attention_scale_beta", "attention_softcap", "attention_sinks")
    names += ("qk_norm_scope", "qk_norm_kind", "qk_norm_bias", "qk_norm_after_rope")
    names += ("norm_bias", "norm_weight", "parallel_residual", "residual_scale", "embedding_scale", "embedding_norm")
    names += ("output_scale", "output_softcap", "output_bias", "mtp_num_layers", "first_attention_norm", "head_bias")
    names += ("attention_window", "window_layers", "rope_layers", "rope_local_theta")
    return {f"{name} {getattr(model, name)}": getattr(model, name) != getattr(Model(), name) for name in names}


def _rope_misfits(model: Model, names: "MegatronNames") -> dict[str, bool]:
    """Returns descriptions of RoPE settings -> whether the model has them and Megatron does not support them."""
    scaled = model.rope_scaling == "llama3"
    other = {name: getattr(model, name) for name, value in LLAMA3.items() if getattr(model, name) != value}
    advice = "; use --transformer-impl transformer_engine"
    return {
        f"rope_theta {model.rope_theta:g} (only {LEGACY_ROPE_BASE:g}){advice}": (
            names.is_legacy and model.rope_theta != LEGACY_ROPE_BASE
        ),
        f"rope_scaling llama3{advice}": names.is_legacy and scaled,
        f"rope_scaling {model.rope_scaling}": model.rope_scaling not in ("none", "linear", "llama3"),
        f"rope_scaling llama3 with {', '.join(f'{name} {value:g}' for name, value in other.items())}": scaled
        and bool(other),
    }


def _sizes(model: Model, vocab_rows: int) -> dict[str, Any]:
    """Returns Megatron's arguments of sizes."""
    is_grouped = num_kv_heads(model) != model.num_heads
    return {
        "num_layers": model.num_layers,
        # Megatron sets both from either one.
        "encoder_num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": mlp_size(model),
        "num_attention_heads": model.num_heads,
        "group_query_attention": is_grouped,
        # Megatron's default without grouped-query attention.
        "num_query_groups": num_kv_heads(model) if is_grouped else 1,
        "kv_channels": head_dim(model),
        "seq_length": model.sequence_length,
        "encoder_seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": vocab_rows,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
    }


def _kinds(model: Model, names: "MegatronNames") -> dict[str, Any]:
    """Returns Megatron's arguments of norms, activations, biases and heads."""
    tanh, has_bias = model.activation == "gelu", attention_bias(model) == "all"
    return {
        "use_legacy_models": names.is_legacy,
        "transformer_impl": "local" if names.is_legacy else names.transformer_impl,
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        # The inverse of `_activation`: the fused kernel, or without biases --openai-gelu, is the tanh approximation.
        "bias_gelu_fusion": tanh and has_bias,
        "openai_gelu": tanh and not has_bias,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "relu2",
        "add_bias_linear": has_bias,
        "add_qkv_bias": attention_bias(model) == "qkv",
        "qk_layernorm": model.qk_norm,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "bert_binary_head": model.family == "bert" and model.sentence_order,
    }


def _positions(model: Model) -> dict[str, Any]:
    """Returns Megatron's arguments of position embeddings."""
    if model.position == "learned":
        return {"add_position_embedding": True, "position_embedding_type": "learned_absolute"}
    if model.position == "none":
        return {"add_position_embedding": True, "position_embedding_type": "none"}
    return {
        "add_position_embedding": False,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        # Megatron's --rotary-base is an integer.
        "rotary_base": int(model.rope_theta) if float(model.rope_theta).is_integer() else model.rope_theta,
        "rotary_percent": model.rope_fraction,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": model.rope_factor if model.rope_scaling == "linear" else None,
        "use_rope_scaling": model.rope_scaling == "llama3",
        "rope_scaling_factor": model.rope_factor if model.rope_scaling == "llama3" else 8.0,
    }
