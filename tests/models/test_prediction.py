"""Multi-token prediction: the same losses on every mesh, of the global batch and within documents."""

from typing import Any

import pytest

from tests.tiny import program_of, run_steps

PLAIN: dict[str, Any] = {"mtp_num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = PLAIN | {"family": "llama", "num_experts": 4, "router_bias": True, "capacity_factor": 1.5}
EXPERTS |= {"first_dense_layers": 1, "router_z_loss": 0.01}


@pytest.mark.parametrize(
    ("settings", "mesh", "other"),
    [
        (PLAIN | {"reset_attention_mask": True}, "2x2", {"sequence_parallel": True, "zero": 3, "microbatch_size": 2}),
        (PLAIN | {"hidden_dropout": 0.1}, "data=2,stage=2,model=2", {"microbatch_size": 2, "zero": 2}),
        (EXPERTS, "data=2,stage=2,expert=2,model=1", {"microbatch_size": 1, "zero": 1}),
        (EXPERTS, "data=1,expert=2,model=2", {"sequence_parallel": True, "zero": 3, "recompute": "full"}),
    ],
    ids=["documents, split sequences, ZeRO-3", "stages, dropout", "experts, stages", "experts, ZeRO-3"],
)
def test_losses_do_not_depend_on_the_mesh(settings: dict[str, Any], mesh: str, other: dict[str, Any]) -> None:
    """Of three steps, so that gradients and routers' biases count; each layer's loss by its name."""
    _, alone = run_steps(program_of("1x1", **settings), 3)
    _, meshed = run_steps(program_of(mesh, **settings, **other), 3)
    assert {"mtp_1_loss", "mtp_2_loss"} <= alone[0].keys()
    for ours, theirs in zip(meshed, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
