"""What Megatron's hybrid models do not have."""

from typing import Any

import pytest

from mtjax.config import Model
from mtjax.convert.megatron_hybrid import hybrid_misfits


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssm_norm": False}, "ssm_norm False"),
        ({"mlp_output_scale": 0.6}, "mlp_output_scale 0.6"),
        ({"layer_pattern": "H-", "num_layers": 2}, r"layers with Mamba-2 and attention side by side (H)"),
        ({"layer_pattern": "G-", "num_layers": 2}, "gated delta nets (G)"),
        ({"attention_output_gate": True}, "attention_output_gate True"),
        ({"ssm_conv": 3}, "ssm_conv 3 (only 4)"),
    ],
)
def test_what_megatron_does_not_have_is_said(settings: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"family": "hybrid", "layer_pattern": "M-", "num_layers": 2, **settings}
    wrong = hybrid_misfits(Model(**fields), "transformer_engine")
    assert [what for what, holds in wrong.items() if holds] == [said]
