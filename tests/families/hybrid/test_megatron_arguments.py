"""What Megatron's hybrid models do not have."""

from typing import Any

import pytest

from mtjax.config import Model
from mtjax.families.hybrid.megatron_arguments import hybrid_misfits, unread_hybrid

DELTA: dict[str, Any] = {"norm": "rmsnorm", "activation": "swiglu"}
MAMBA = {"mamba_num_heads": 32, "mamba_head_dim": 128, "mamba_num_groups": 16}
"""Those that gated delta nets have by default."""
READ: dict[str, Any] = {"position_embedding_type": "none", "normalization": "RMSNorm", "swiglu": True}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssm_norm": False}, "ssm_norm False"),
        ({"mlp_output_scale": 0.6}, "mlp_output_scale 0.6"),
        ({"layer_pattern": "H-", "num_layers": 2}, r"layers with Mamba-2 and attention side by side (H)"),
        ({"layer_pattern": "MZ"}, "layers that read a shared block (Z)"),
        ({"layer_pattern": "G-", **DELTA, "norm": "layernorm"}, "norm layernorm with gated delta nets (G)"),
        (
            {"layer_pattern": "G-", **DELTA, "activation": "relu2"},
            "activation relu2 beside gated delta nets (G), which have SiLU only with swiglu",
        ),
        ({"ssm_conv": 3}, "ssm_conv 3 (only 4)"),
    ],
)
def test_what_megatron_does_not_have_is_said(settings: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"family": "hybrid", "layer_pattern": "M-", "num_layers": 2, **settings}
    wrong = hybrid_misfits(Model(**fields), "transformer_engine")
    assert [what for what, holds in wrong.items() if holds] == [said]


@pytest.mark.parametrize(
    ("letters", "arguments", "said"),
    [
        ("G-", {}, None),
        ("G-", {"swiglu": False}, "swiglu is False, and gated delta nets (G) have SiLU only with it"),
        ("G-", {"experimental_attention_variant": "gdn2"}, "experimental_attention_variant is 'gdn2'"),
        (
            "G-",
            {"normalization": "LayerNorm"},
            "normalization is LayerNorm, and that of gated delta nets (G) is only read as RMSNorm",
        ),
        # Megatron's default for Mamba-2: 2 x hidden_size / mamba_head_dim.
        ("MG", {**MAMBA, "mamba_num_heads": None, "hidden_size": 2048}, None),
        (
            "MG",
            {**MAMBA, "mamba_num_heads": None, "hidden_size": 1024},
            "linear_num_value_heads is 32 and mamba_num_heads is 16",
        ),
        ("MG", {"linear_conv_kernel_dim": 3, **MAMBA}, "linear_conv_kernel_dim is 3 beside Mamba-2's 4"),
        ("MG", {"mamba_state_dim": 64, **MAMBA}, "linear_key_head_dim is 128 and mamba_state_dim is 64"),
    ],
)
def test_gated_delta_nets_that_are_not_read_are_said(letters: str, arguments: dict[str, Any], said: str | None) -> None:
    assert unread_hybrid({**READ, **arguments}, letters) == ([said] if said else [])
