"""Multi-token prediction: the same losses on every mesh, of the global batch and within documents."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Config, replace
from mtjax.models.prediction import prediction_weights
from mtjax.train.step import TrainStep
from tests.tiny import program_of, run_steps

PLAIN: dict[str, Any] = {"mtp_num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = PLAIN | {"family": "llama", "num_experts": 4, "router_bias": True, "capacity_factor": 1.5}
EXPERTS |= {"first_dense_layers": 1, "router_z_loss": 0.01}


def test_a_prediction_counts_where_its_token_does_and_in_its_document() -> None:
    """Means over the tokens that count in all samples together, however many each has."""
    batch = {
        "loss_mask": jnp.asarray([[1, 0, 1, 1, 1], [1, 1, 0, 0, 1.0]]),
        "segment_ids": jnp.asarray([[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]),
    }
    model = replace(Config(), mtp_num_layers=2, mtp_loss_scaling_factor=0.6).model
    found = prediction_weights(model, batch)
    first = np.array([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0]])
    second = np.array([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0]])
    np.testing.assert_allclose(found["mtp_1_loss"], 0.3 * first / 4, rtol=1e-6)
    np.testing.assert_allclose(found["mtp_2_loss"], 0.3 * second / 2, rtol=1e-6)
    del batch["segment_ids"]
    everywhere = np.array([[0, 1, 1, 1, 0], [1, 0, 0, 1, 0]])
    np.testing.assert_allclose(prediction_weights(model, batch)["mtp_1_loss"], 0.3 * everywhere / 5, rtol=1e-6)


def test_an_evaluation_has_the_loss_of_the_model_alone() -> None:
    program = program_of("1x1", **PLAIN)
    assert program.evaluation.lower().out_info.keys() == {"loss"}


def abstract(program: TrainStep) -> tuple[Any, Any]:
    return program.restore_target, program.abstract_batch()


@pytest.mark.parametrize(
    ("settings", "mesh", "other"),
    [
        pytest.param(
            PLAIN | {"reset_attention_mask": True},
            *("2x2", {"sequence_parallel": True, "zero": 3, "microbatch_size": 2}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(PLAIN, *("data=2,stage=2,model=2", {"microbatch_size": 2, "zero": 2}), marks=pytest.mark.long),
        pytest.param(
            PLAIN | {"hidden_dropout": 0.1},
            *("data=2,stage=2,model=2", {"microbatch_size": 2, "zero": 2}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            EXPERTS,
            *("data=2,stage=2,expert=2,model=1", {"microbatch_size": 1, "zero": 1}),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            EXPERTS | {"mtp_num_layers": 1},
            *("data=1,expert=2,model=2", {"sequence_parallel": True, "zero": 3, "recompute": "full"}),
            marks=pytest.mark.long,
        ),
    ],
    ids=["documents, split sequences, ZeRO-3", "stages", "stages, dropout", "experts, stages", "experts, ZeRO-3"],
)
def test_losses_do_not_depend_on_the_mesh(settings: dict[str, Any], mesh: str, other: dict[str, Any]) -> None:
    """Of three steps, so that gradients and routers' biases count; each layer's loss by its name."""
    _, alone = run_steps(program_of("1x1", **settings), 3)
    _, meshed = run_steps(program_of(mesh, **settings, **other), 3)
    assert {f"mtp_{layer}_loss" for layer in range(1, 1 + settings["mtp_num_layers"])} <= alone[0].keys()
    for ours, theirs in zip(meshed, alone, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=1e-6)
