"""Megatron-Core's hybrid models: their patterns of layers, and translation of their arguments and settings."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mtjax.config import Model
from mtjax.config.layer_pattern import expanded, shortened_pattern
from mtjax.config.shared_blocks import block_letters
from mtjax.config.ssm import letters_of, ssm_groups, ssm_heads
from mtjax.convert.megatron_experts import has_experts
from mtjax.errors import UserError
from mtjax.migrate.megatron import default_of

EPSILON, TAPS = 1e-5, 4
"""Constants of Megatron's Mamba-2 layers: the epsilon of the gated norm, and the tokens of the convolution."""
SIZES: Mapping[str, str] = {
    "mamba_num_heads": "ssm_heads",
    "mamba_head_dim": "ssm_head_dim",
    "mamba_state_dim": "ssm_state",
    "mamba_num_groups": "ssm_groups",
}
"""Arguments of Mamba-2 layers -> mtjax's settings."""
DELTA_SIZES: Mapping[str, str] = {
    "linear_num_value_heads": "ssm_heads",
    "linear_value_head_dim": "ssm_head_dim",
    "linear_key_head_dim": "ssm_state",
    "linear_num_key_heads": "ssm_groups",
    "linear_conv_kernel_dim": "ssm_conv",
}
"""Arguments of gated delta nets -> mtjax's settings."""
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
"""Arguments of the pattern: now, and until Megatron-Core 0.16."""
RATIOS = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
VARIANTS = "experimental_attention_variant"
DELTA_NETS = ("gdn", "gated_delta_net")
"""Values of it that are gated delta nets."""
ALLOWED = frozenset({"position_embedding_type", "attention_output_gate", "linear_attention_freq", VARIANTS, *PATTERNS})
"""Arguments of a GPT of which hybrid models have other values."""
_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(mixer|self_attention\.in_proj|self_attention|mlp\.router|mlp)\.")
_LETTERS: Mapping[str, str] = {
    "mixer": "M",
    "self_attention": "*",
    "self_attention.in_proj": "G",
    "mlp": "-",
    "mlp.router": "E",
}
_INCLUDED: Mapping[frozenset[str], str] = {frozenset("-E"): "E", frozenset("*G"): "G"}
"""Letters of one layer's tensors -> its letter: a router is in an MLP's place, a gated delta net in attention's."""


def is_hybrid(arguments: Mapping[str, Any]) -> bool:
    """Returns whether arguments are those of a hybrid model."""
    spec = arguments.get("spec") or ()
    words = (spec,) if isinstance(spec, str) else spec
    named = any(arguments.get(name) for name in (*PATTERNS, *RATIOS, "is_hybrid_model"))
    return named or any(word in _SPECS for word in words)


def letters_in(tensors: Iterable[str]) -> str:
    """Returns the letter of each layer of a hybrid model, by its tensors' names; "" for another model."""
    kinds: dict[int, set[str]] = {}
    for name in tensors:
        if match := _LAYER.match(name):
            kinds.setdefault(int(match[1]), set()).add(_LETTERS[match[2]])
    # Attention and an MLP in one layer are a transformer's.
    found = [_INCLUDED.get(frozenset(of), "".join(sorted(of))) for _, of in sorted(kinds.items())]
    return "".join(found) if all(len(letter) == 1 for letter in found) else ""


def pattern_of(arguments: Mapping[str, Any]) -> str:
    """Returns the letters of the layers that arguments describe.

    Raises:
      UserError: the pattern has layers that mtjax does not have, or there is neither a pattern nor a number of layers.
    """
    given = next((str(arguments[name]) for name in PATTERNS if arguments.get(name)), None)
    if given is not None:
        return expanded(given.replace("|", ""))  # between the layers of two stages
    if arguments.get("num_layers") is None:
        raise UserError("missing --hybrid-layer-pattern or --num-layers")
    attention, mlp = (float(arguments.get(name) or 0) for name in RATIOS)
    if attention < 0 or mlp < 0 or attention + mlp > 1:
        raise UserError(
            f"--hybrid-attention-ratio {attention:g} and --hybrid-mlp-ratio {mlp:g} must be 0 or more, and 1 or less "
            "together"
        )
    return _spread(arguments["num_layers"], attention, mlp)


def _spread(layers: int, attention: float, mlp: float) -> str:
    """Returns the layers by their shares, as Megatron-Core places them: attention evenly between sections of Mamba-2,
    then MLPs evenly in place of Mamba-2, the last of each section first."""
    num_attention = round(layers * attention)
    letters = _placed(["M"] * layers, "*", (layers - num_attention) / (num_attention + 1))
    if not (replaced := round(layers * mlp)):
        return "".join(letters)
    return "".join(_placed(letters, "-", (layers - num_attention - replaced) / replaced))


def _placed(letters: list[str], letter: str, section: float) -> list[str]:
    """Puts a letter after every section of so many M, counted with fractions."""
    found, left = [], section
    for old in letters:
        # Megatron-Core's own loop, with its rounding: another rule would place some layers differently.
        is_end = old == "M" and left < 0.5
        found.append(letter if is_end else old)
        left += section if is_end else -1 if old == "M" else 0
    return found


def unread_hybrid(arguments: Mapping[str, Any], letters: str) -> list[str]:
    """Returns the arguments with which mtjax does not support a hybrid model."""
    position = arguments.get("position_embedding_type") or default_of("position_embedding_type")
    epsilon = arguments.get("norm_epsilon", arguments.get("layernorm_epsilon")) or EPSILON
    wrong = {
        f"position_embedding_type is {position!r} in a hybrid model": position not in ("none", "rope"),
        f"norm_epsilon is {epsilon:g}, and the gated norm of Megatron's Mamba-2 layers has {EPSILON:g}": (
            "M" in letters and epsilon != EPSILON
        ),
        "qk_layernorm is True, which Megatron's hybrid models ignore": bool(arguments.get("qk_layernorm")),
        f"num_experts is {arguments.get('num_experts')!r} for layers with experts (E)": (
            "E" in letters and not has_experts(arguments)
        ),
        **(_unread_delta(arguments, letters) if "G" in letters else {}),
    }
    return [what for what, holds in wrong.items() if holds]


def _unread_delta(arguments: Mapping[str, Any], letters: str) -> dict[str, bool]:
    """Returns descriptions of arguments -> whether mtjax does not support gated delta nets with them."""
    variant, norm = arguments.get(VARIANTS), arguments.get("normalization") or default_of("normalization")
    mamba, delta = (_sizes(arguments, of) for of in (SIZES, DELTA_SIZES))
    if mamba["ssm_heads"] is None and "M" in letters:
        # Megatron's default: twice the hidden size in heads of the given size.
        mamba["ssm_heads"] = 2 * arguments["hidden_size"] // mamba["ssm_head_dim"]
    differing = {
        f"{theirs} is {delta[ours]} and {name} is {mamba[ours]}": "M" in letters and mamba[ours] != delta[ours]
        for name, ours in SIZES.items()
        for theirs in (key for key, value in DELTA_SIZES.items() if value == ours)
    }
    return {
        f"{VARIANTS} is {variant!r}": variant not in (None, *DELTA_NETS),
        "swiglu is False, and gated delta nets (G) have SiLU only with it": not arguments.get("swiglu"),
        f"normalization is {norm}, and that of gated delta nets (G) is only read as RMSNorm": norm != "RMSNorm",
        f"linear_conv_kernel_dim is {delta['ssm_conv']} beside Mamba-2's {TAPS}": (
            "M" in letters and delta["ssm_conv"] != TAPS
        ),
        **differing,
    }


def _sizes(arguments: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: arguments.get(theirs) or default_of(theirs) for theirs, ours in names.items()}


def hybrid_settings(arguments: Mapping[str, Any], letters: str) -> dict[str, Any]:
    """Returns mtjax's settings of a hybrid model from the arguments, besides those of a decoder."""
    # mtjax has one set of sizes for both; with both kinds `_unread_delta` has checked that they are equal.
    sizes = _sizes(arguments, SIZES if "M" in letters or "G" not in letters else DELTA_SIZES)
    is_rope = arguments.get("position_embedding_type") == "rope"
    return {
        "family": "hybrid",
        "layer_pattern": shortened_pattern(letters),
        "num_layers": len(letters),
        "position": "rope" if is_rope else "none",
        "attention_output_gate": bool(arguments.get("attention_output_gate")) and "*" in letters,
        **sizes,
    }


NOT_IN_MEGATRON = (
    *("ssm_norm", "ssm_scales", "ssm_output_scale"),
    *("attention_output_scale", "mlp_gate_scale", "mlp_output_scale"),
)
"""Settings of hybrid models that Megatron does not have: Falcon-H1's."""


def hybrid_misfits(model: Model, transformer_impl: str) -> dict[str, bool]:
    """Returns descriptions of settings -> whether a hybrid model has them and Megatron does not support them."""
    letters, is_core = letters_of(model), transformer_impl == "transformer_engine"
    has_mamba, has_delta, has_mlp = "M" in letters, "G" in letters, bool(set("-E") & set(letters))
    return {
        f"family hybrid in the implementation {transformer_impl}; remove --transformer-impl": not is_core,
        f"ssm_rate_floor {model.ssm_rate_floor:g}": has_mamba and model.ssm_rate_floor != 0,
        f"ssm_conv {model.ssm_conv} (only {TAPS})": has_mamba and model.ssm_conv != TAPS,
        f"norm_epsilon {model.norm_epsilon:g} (only {EPSILON:g}) in the gated norm of Mamba-2": (
            has_mamba and model.norm_epsilon != EPSILON
        ),
        "qk_norm in a hybrid model": model.qk_norm,
        f"activation {model.activation} beside gated delta nets (G), which have SiLU only with swiglu": (
            has_delta and has_mlp and model.activation != "swiglu"
        ),
        f"norm {model.norm} with gated delta nets (G)": has_delta and model.norm != "rmsnorm",
        "layers with Mamba-2 and attention side by side (H)": "H" in letters,
        "layers that read a shared block (Z)": bool(block_letters(model)),
        **{
            f"{name} {getattr(model, name)}": getattr(model, name) != getattr(Model(), name) for name in NOT_IN_MEGATRON
        },
    }


def hybrid_arguments(model: Model) -> dict[str, Any]:
    """Returns Megatron's arguments of a hybrid model, {} for others."""
    if not model.layer_pattern:
        return {}
    effective, letters = {"ssm_heads": ssm_heads(model), "ssm_groups": ssm_groups(model)}, letters_of(model)
    has_delta = "G" in letters
    sizes = {**SIZES, **(DELTA_SIZES if has_delta else {})}
    # Since Megatron-Core 0.17, which has G.
    spec = ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    return {
        **{theirs: effective.get(ours, getattr(model, ours)) for theirs, ours in sizes.items()},
        "is_hybrid_model": True,
        "attention_output_gate": model.attention_output_gate,
        **({"swiglu": True, "squared_relu": False} if has_delta else {}),
        # Both names, for versions before and after 0.16.
        **dict.fromkeys(PATTERNS, letters),
        **dict.fromkeys(RATIOS, 0.0),
        "position_embedding_type": model.position,
        "spec": spec if has_delta else ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    }
