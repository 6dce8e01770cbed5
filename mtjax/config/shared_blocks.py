"""Shared blocks of hybrid models (Zamba2): attention and an MLP that several Mamba-2 layers run, with one copy of their
weights."""

from typing import TYPE_CHECKING

from mtjax.config.layer_pattern import SHARED, expanded
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.config.model import Model

BLOCK = "block_"
"""Prefix of the names of the blocks' parameters; blocks count from 1."""
FIRST, SECOND = SHARED
"""Letters of the layers that read the first block, and the second."""


def block_letters(model: "Model") -> str:
    """Returns the letter of each layer that reads a shared block."""
    return "".join(letter for letter in expanded(model.layer_pattern) if letter in SHARED)


def num_blocks(model: "Model") -> int:
    """Returns the number of shared blocks."""
    return len(set(block_letters(model)))


def check_shared_blocks(model: "Model") -> None:
    """Checks a hybrid model that has shared blocks.

    Raises:
      UserError: its pattern or other settings do not support them; names the settings.
    """
    letters = block_letters(model)
    if not letters:
        return
    shown = f"layer_pattern {model.layer_pattern!r}"
    if others := sorted(set(expanded(model.layer_pattern)) - {"M", *SHARED}):
        raise UserError(
            f"{shown} has shared blocks ({letters[0]}) and layers {' and '.join(others)}, and shared blocks support "
            "M beside them alone: remove the others"
        )
    # Blocks are numbered from 1, however many there are: the second one alone would be called the first.
    if FIRST not in letters:
        raise UserError(f"{shown} has the second shared block ({SECOND}) without the first: use {FIRST}")
    for name, default in _UNSUPPORTED.items():
        if (value := getattr(model, name)) != default:
            raise UserError(
                f"{name} is {value}, and shared blocks ({letters[0]} in {shown}) do not support it: remove {name}"
            )
    if model.block_attention_adapters and model.num_kv_heads not in (None, model.num_heads):
        raise UserError(
            f"block_attention_adapters needs as many key heads as query heads, and num_kv_heads is "
            f"{model.num_kv_heads} and num_heads {model.num_heads}: remove one of the two settings"
        )


_UNSUPPORTED = {
    "qk_norm": False,
    "qkv_clip": None,
    "attention_sinks": False,
    "attention_output_gate": False,
    "bias": False,
    "attention_bias": "auto",
    "mlp_bias": None,
    "attention_output_scale": 1.0,
    "mlp_gate_scale": 1.0,
    "mlp_output_scale": 1.0,
}
"""Settings of layers that shared blocks do not have -> the value that has no effect."""
