"""Sizes of layers with a recurrent state: Mamba-2 and gated delta nets."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mtjax.config.layer_pattern import expanded

if TYPE_CHECKING:
    from mtjax.config.model import Model

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
    unread = tuple(
        start
        for letters_that_read, starts in READ_BY.items()
        if not set(letters_that_read) & set(letters)
        for start in starts
    )
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
    # A chunk takes 2 q^2 bytes a head: fewer would leave a GPU idle between short products, more would need the memory.
    return max(1, BLOCK_BYTES // (2 * samples * heads * ssm_chunk(model) ** 2))


def delta_chunks_at_once(model: "Model", samples: int, heads: int) -> int:
    """Returns how many chunks of a gated delta net of each of `samples` a rank with so many heads computes at once."""
    # Its states, one for each chunk, are float32, and mostly larger than the weights between the tokens of a chunk.
    each = max(2 * ssm_chunk(model) ** 2, 4 * model.ssm_state * model.ssm_head_dim)
    return max(1, BLOCK_BYTES // (samples * heads * each))
