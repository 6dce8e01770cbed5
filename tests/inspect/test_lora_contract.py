"""Contracts of finetuning with low-rank adapters, on compiled programs: gradients of adapters alone are summed."""

from typing import Any

import pytest

from mtjax.analysis.counts import trainable_counts
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, theory_of, tiny
from tests.inspect.test_contract import sent
from tests.tiny import LATENT

LORA: dict[str, Any] = {"family": "llama", "num_kv_heads": 2, "mlp_size": 176, "lora_rank": 4}
LATENTS: dict[str, Any] = {"num_kv_heads": None, "num_layers": 2, "attention": "xla", "q_lora_rank": 40, **LATENT}


def check(report: Report) -> None:
    """The contract holds, and what is summed over data is as large as the adapters."""
    assert report.verdict.violations == ()
    assert report.contract.name.endswith("LoRA")
    adapters = trainable_counts(*theory_of(report.config)).all
    summed = sum(elements * n for (_, elements, _), n in sent(report, "gradients", ("data",)).items())
    assert summed - adapters in range(3)
    # With split sequences what comes from a row-parallel adapter is computed for a rank's own tokens only.
    assert abs(report.flops.difference) < (0.06 if report.config.parallel.sequence_parallel else 0.01)


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"sequence_parallel": True, "zero": 1, "num_kv_heads": 4},
        pytest.param(LATENTS | {"sequence_parallel": True, "zero": 1}, marks=pytest.mark.exhaustive),
        pytest.param(LATENTS, marks=pytest.mark.exhaustive),
        pytest.param(LATENTS | {"q_lora_rank": 0, "sequence_parallel": True}, marks=pytest.mark.exhaustive),
        pytest.param(LATENTS | {"lora_targets": "mlp", "sequence_parallel": True}, marks=pytest.mark.exhaustive),
    ],
)
def test_only_adapters_travel_on_h100(settings: dict[str, Any]) -> None:
    check(inspect(tiny(**LORA | settings), find_target("h100x8")))


WIDE: dict[str, Any] = {"mlp_size": 192, "lora_rank": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "v_head_dim": 16}
"""Widths of multiples of 8 on a rank: without a loop matmuls are cuBLAS's, for which XLA pads others."""


@needs_aot
@pytest.mark.long
def test_unrolled_layers_with_zero_3_sum_gradients_in_the_type_that_is_sent_on_h100() -> None:
    """Those of adapters that ranks hold alike, from their own tokens. No first layer's input has a gradient, and
    matrices that only this one needs are gathered once."""
    fields = {"sequence_parallel": True, "zero": 3, "unroll_layers": True, "recompute": "none", "qk_rope_head_dim": 8}
    report = inspect(tiny(**LORA | LATENTS | WIDE | fields), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert abs(report.flops.difference) < 0.06


EXPERTS: dict[str, Any] = {"num_experts": 4, "expert_size": 48, "num_layers": 2, "mesh": "data=2,expert=2,model=2"}


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_parallel": True, "zero": 1, "shared_expert_size": 32, "shared_expert_gate": True},
        pytest.param(
            {"lora_targets": "mlp", "expert_dispatch": "all-to-all", "num_layers": 1, "recompute": "none"},
            marks=pytest.mark.exhaustive,
        ),
        *(
            pytest.param(settings, marks=pytest.mark.exhaustive)
            for settings in (
                {"shared_expert_size": 32, "expert_bias": True, "zero": 3, "first_dense_layers": 1},
                {"mesh": "2x4", "capacity_factor": 1.0},
                {"lora_targets": "attention", "sequence_parallel": True},
            )
        ),
    ],
)
def test_experts_keep_their_matrices_on_h100(settings: dict[str, Any]) -> None:
    """Each expert has adapters; their gradients are summed over the ranks that share the expert."""
    report = inspect(tiny(**LORA | {"attention": "xla"} | EXPERTS | settings), find_target("h100x8"))
    assert report.verdict.violations == ()


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"mesh": "2x2", "sequence_parallel": True},
        LATENTS | {"mesh": "2x2", "sequence_parallel": True, "num_layers": 1, "global_batch_size": 4},
    ],
    ids=["whole", "split", "split, latent attention"],
)
def test_only_adapters_travel_on_cpus(settings: dict[str, Any]) -> None:
    check(inspect(tiny(**LORA | {"num_layers": 2} | settings), find_target("cpu")))


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "2x2", "num_layers": 1, "lora_targets": "attention", "sequence_parallel": True},
        {"mesh": "data=2,stage=2,model=2", "num_layers": 2, "head": "classification"},
        {"mesh": "data=2,stage=2,model=2", "num_layers": 2, "lora_targets": "mlp", "sequence_parallel": True},
    ],
)
def test_nobody_makes_gradients_that_nobody_reads(settings: dict[str, Any]) -> None:
    fields = {"recompute": "none", "compute_dtype": "float32"}
    assert inspect(tiny(**LORA | fields | settings), find_target("cpu")).verdict.violations == ()


@pytest.mark.long
def test_stages_send_each_other_no_gradients_of_what_is_frozen() -> None:
    settings = {"mesh": "data=2,stage=2,model=2", "num_layers": 4, "compute_dtype": "float32"}
    report = inspect(tiny(**LORA | settings), find_target("cpu"))
    assert report.verdict.violations == ()
    assert not [e for _, e, _ in sent(report, "gradients", ("stage",)) if e > 64]
