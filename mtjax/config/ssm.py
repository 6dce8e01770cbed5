"""Sizes of layers with a recurrent state (Mamba-2, gated delta nets), and what hybrid models are not combined with."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mtjax.config.layer_loops import one_kind_only
from mtjax.config.layer_pattern import expanded
from mtjax.config.shared_blocks import check_shared_blocks
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.config.model import Model
    from mtjax.config.run import Config

GROUPS = 8
"""Most groups of heads where ssm_groups is not given."""
CHUNK = 128
"""Tokens of a chunk where ssm_chunk is not given."""
SCALED = ("gate", "value", "B", "C", "dt")
"""What ssm_scales multiplies."""
BLOCK_BYTES = 128 * 2**20
"""Bytes of the weights between the tokens of its chunks that a rank computes at once, in 16 bits."""


def letters_of(model: "Model") -> str:
    """Returns the letter of each layer of a hybrid model; "" for other families."""
    return expanded(model.layer_pattern)


ATTENTION, STATE_SPACE, DELTA = "*HZz", "MHZz", "G"
"""Letters of the layers with attention, with Mamba-2, and with a gated delta net."""
RECURRENT = STATE_SPACE + DELTA
"""Letters of the layers with a recurrent state."""


def numbers_of(model: "Model", letters: str) -> tuple[int, ...]:
    """Returns the numbers of the layers with one of these letters."""
    return tuple(number for number, own in enumerate(letters_of(model)) if own in letters)


def has_attention(model: "Model") -> bool:
    """Returns whether a model has layers with attention: all but some hybrid models."""
    return not letters_of(model) or bool(numbers_of(model, ATTENTION))


def has_state_space(model: "Model") -> bool:
    """Returns whether a model has layers with a recurrent state, of Mamba-2 or of a gated delta net."""
    return bool(numbers_of(model, RECURRENT))


READ_BY: Mapping[str, tuple[str, ...]] = {
    STATE_SPACE: ("ssm_norm", "ssm_scales", "ssm_rate_floor", "ssm_output_scale"),
    RECURRENT: ("ssm_",),
    ATTENTION: ("num_heads", "num_kv_heads", "head_dim", "attention_", "qk", "rope_", "window_layers"),
    "-Zz": ("mlp_",),
    "Zz": ("block_",),
    "E": ("expert", "router_", "shared_expert", "capacity_factor", "num_experts"),
}
"""Letters -> beginnings of the settings that their layers alone read."""


def without_effect(model: "Model") -> frozenset[str]:
    """Returns the settings of kinds of layers that a hybrid model does not have."""
    letters = letters_of(model)
    if not letters:
        return frozenset()
    unread = tuple(start for own, starts in READ_BY.items() if not set(own) & set(letters) for start in starts)
    unread += () if set("-EZz") & set(letters) else ("activation",)
    return frozenset(name for name in vars(model) if unread and name.startswith(unread))


def ssm_heads(model: "Model") -> int:
    """Returns the number of heads of a state-space layer: as Megatron's, twice the hidden size by default."""
    return model.ssm_heads or 2 * model.hidden_size // model.ssm_head_dim


def ssm_groups(model: "Model") -> int:
    """Returns the number of groups of heads of a state-space layer: as Megatron's, 8 by default, where 8 divides the
    heads."""
    return model.ssm_groups or (math.gcd(GROUPS, ssm_heads(model)) if model.layer_pattern else GROUPS)


def ssm_chunk(model: "Model") -> int:
    """Returns the tokens of a chunk of a layer with a recurrent state."""
    return model.ssm_chunk or min(CHUNK, model.sequence_length)


def chunks_at_once(model: "Model", samples: int, heads: int) -> int:
    """Returns how many chunks of each of `samples` a rank with so many heads computes at once."""
    # Of each chunk 2 q^2 bytes a head: fewer would leave a GPU idle between short products, more would need the memory.
    return max(1, BLOCK_BYTES // (2 * samples * heads * ssm_chunk(model) ** 2))


def delta_chunks_at_once(model: "Model", samples: int, heads: int) -> int:
    """Returns how many chunks of a gated delta net of each of `samples` a rank with so many heads computes at once."""
    # Its states, one for each chunk, are float32, and mostly larger than the weights between the tokens of a chunk.
    each = max(2 * ssm_chunk(model) ** 2, 4 * model.ssm_state * model.ssm_head_dim)
    return max(1, BLOCK_BYTES // (samples * heads * each))


def check_hybrid(model: "Model") -> None:
    """Checks the pattern of a hybrid model, and the sizes of its state-space layers.

    Raises:
      UserError: they are inconsistent; names the settings and what fits.
    """
    letters = letters_of(model)
    if not letters:
        raise UserError(
            "layer_pattern is empty, and the family hybrid needs the kind of each layer: add --layer-pattern, for "
            "example '(M-M*-)x4'"
        )
    if len(letters) != model.num_layers:
        raise UserError(
            f"num_layers is {model.num_layers}, and layer_pattern {model.layer_pattern!r} has {len(letters)} layers: "
            "remove num_layers, which follows from the pattern"
        )
    if ("E" in letters) != bool(model.num_experts):
        has = "has" if "E" in letters else "has no"
        raise UserError(
            f"layer_pattern {model.layer_pattern!r} {has} layers with experts (E), and num_experts is "
            f"{model.num_experts}: change one of the two"
        )
    for name in ("first_dense_layers", "moe_every"):
        if (value := getattr(model, name)) != getattr(type(model)(), name):
            raise UserError(f"{name} is {value}, and layer_pattern says which layers have experts: remove {name}")
    check_shared_blocks(model)
    adapted = {"attention": ATTENTION, "mlp": "-EZz", "mixers": ATTENTION + RECURRENT}.get(model.lora_targets, letters)
    if model.lora_rank and not set(adapted) & set(letters):
        raise UserError(
            f"lora_targets is {model.lora_targets}, and layer_pattern {model.layer_pattern!r} has none of these "
            "layers: remove lora_targets"
        )
    if has_state_space(model):
        _check_state_space(model)


def _check_state_space(model: "Model") -> None:
    for name in () if numbers_of(model, STATE_SPACE) else READ_BY[STATE_SPACE]:
        if (value := getattr(model, name)) != getattr(type(model)(), name):
            raise UserError(
                f"{name} is {value}, and layer_pattern {model.layer_pattern!r} has no Mamba-2, which alone has it: "
                f"remove {name}"
            )
    if model.ssm_scales is not None and len(model.ssm_scales) != len(SCALED):
        raise UserError(
            f"ssm_scales has {len(model.ssm_scales)} numbers, and needs {len(SCALED)}: of {', '.join(SCALED)}"
        )
    width, heads = model.ssm_head_dim, ssm_heads(model)
    if model.ssm_heads is None and 2 * model.hidden_size % width:
        raise UserError(
            f"2 x hidden_size {model.hidden_size} is not a multiple of ssm_head_dim {width}, the width of a head of "
            "the layers with a recurrent state: set ssm_heads"
        )
    if heads % ssm_groups(model):
        raise UserError(
            f"ssm_heads {heads} is not divisible by ssm_groups {model.ssm_groups}: use a number of groups that divides "
            f"{heads}"
        )
    if model.ssm_chunk is not None and model.ssm_chunk > model.sequence_length:
        raise UserError(
            f"ssm_chunk {model.ssm_chunk} is longer than sequence_length {model.sequence_length}: use "
            f"{model.sequence_length} or less"
        )


def check_hybrid_run(config: "Config") -> None:
    """Checks that a run of a hybrid model has no settings that its loop over layers does not support.

    Raises:
      UserError: it has one.
    """
    if config.model.family != "hybrid":
        return
    for setting in (name for name, is_set in one_kind_only(config).items() if is_set):
        raise UserError(f"{setting} does not support the family hybrid, whose layers differ: remove it")
