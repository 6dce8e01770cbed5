"""Contracts of training in 8-bit floats, on compiled programs: matmuls, sequences and counts."""

from typing import Any

import pytest

from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.runtime import xla_options
from tests.inspect.steps import crossing_in_layers, needs_aot, tiny

SPLIT: dict[str, Any] = {"sequence_parallel": True, "zero": 1}
TWO_ENDS = {"fp8_bf16_first_layers": 2, "fp8_bf16_last_layers": 1}


@needs_aot
@pytest.mark.parametrize(
    ("settings", "turns"),
    [
        pytest.param(
            {"mesh": "8x1", "zero": 3, "microbatch_size": 1, "fp8": "delayed"},
            1,
            id="delayed, ZeRO-3",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"fp8": "delayed", **SPLIT}, 2, id="delayed, split sequences", marks=pytest.mark.exhaustive),
        pytest.param({"fp8": "tensorwise", **SPLIT}, 2, id="tensorwise", marks=pytest.mark.exhaustive),
        pytest.param(
            {"fp8": "delayed", "fp8_scales": "exact", **SPLIT}, 2, id="delayed, exact scales", marks=pytest.mark.long
        ),
        pytest.param(
            {"fp8": "tensorwise", "fp8_scales": "exact", **SPLIT},
            2,
            id="tensorwise, exact scales",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"mesh": "8x1", "zero": 3, "microbatch_size": 1, "fp8": "rowwise", "fp8_scales": "exact"},
            1,
            id="rowwise, exact scales",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {
                "mesh": "8x1",
                "zero": 3,
                "microbatch_size": 1,
                "fp8": "rowwise",
                "num_layers": 4,
                "fp8_bf16_last_layers": 1,
            },
            1,
            id="rowwise, ZeRO-3",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"fp8": "delayed", **SPLIT, "fp8_bf16_first_layers": 1},
            2,
            id="a layer in 16 bits",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"mesh": "8x1", "zero": 3, "microbatch_size": 1, "fp8": "tensorwise", "num_layers": 6, **TWO_ENDS},
            1,
            id="layers in 16 bits, ZeRO-3",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_matmuls_and_sequences_are_in_8_bits_on_h100(settings: dict[str, Any], turns: int) -> None:
    report = inspect(tiny(**settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    # Of each layer 4 forward, 3 recomputed, as nothing reads the last one's result, and 8 backward.
    assert report.float8 is not None
    ends = settings.get("fp8_bf16_first_layers", 0) + settings.get("fp8_bf16_last_layers", 0)
    assert (report.float8.found, report.float8.expected) == (15 * (settings.get("num_layers", 3) - ends) * turns,) * 2
    assert report.float8.share > 0.4 - 0.1 * ends
    assert abs(report.flops.difference) < 0.01
    gathered = {array.split("[")[0] for _, kind, array in crossing_in_layers(report, "model") if kind == "all-gather"}
    eight = {"f8e4m3fn", "f8e5m2"} if settings["fp8"] == "delayed" and "sequence_parallel" in settings else set()
    assert gathered == eight | (gathered & {"bf16"} if ends or not eight else set())


EXPERTS = {"family": "llama", "num_experts": 4, "shared_expert_size": 64}
LATENT: dict[str, Any] = {"family": "llama", "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 16, "v_head_dim": 16}


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "matmuls"),
    [
        pytest.param({**EXPERTS, **SPLIT}, 15 * 3 * 2, id="experts, split sequences"),
        pytest.param(
            {**EXPERTS, "mesh": "data=2,expert=2,model=2", "shared_expert_size": 0, "num_layers": 4, "moe_every": 2},
            # A layer's first two, recomputed and backward; its last two are the experts'.
            (15 + 8) * 2,
            id="experts in every other layer",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({**LATENT, **SPLIT}, (7 + 6 + 14) * 3 * 2, id="latent attention", marks=pytest.mark.exhaustive),
        pytest.param(
            {"unroll_layers": True, "recompute": "none", **SPLIT},
            12 * 3 * 2,
            id="unrolled",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            {"unroll_layers": True, "recompute": "none", "mesh": "8x1", "zero": 3, "microbatch_size": 1},
            12 * 3,
            id="unrolled, ZeRO-3",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_matmuls_are_in_8_bits_beside_others_that_are_not(settings: dict[str, Any], matmuls: int) -> None:
    report = inspect(tiny(fp8="delayed", **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert report.float8 is not None and (report.float8.found, report.float8.expected) == (matmuls, matmuls)
    assert abs(report.flops.difference) < 0.01


@needs_aot
@pytest.mark.long
def test_layers_of_multi_token_prediction_are_in_16_bits() -> None:
    """And those of latent attention in 8."""
    report = inspect(tiny(fp8="delayed", mtp_num_layers=1, **LATENT, **SPLIT), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert report.float8 is not None and report.float8.missed == ()
    assert (report.float8.found, report.float8.expected) == ((7 + 6 + 14) * 3 * 2,) * 2


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    ("fp8", "settings"),
    [
        ("delayed", SPLIT),
        pytest.param("tensorwise", SPLIT, marks=pytest.mark.exhaustive),
        pytest.param("rowwise", {"mesh": "8x1", "zero": 3, "microbatch_size": 1}, marks=pytest.mark.exhaustive),
    ],
    ids=["delayed", "tensorwise", "rowwise"],
)
def test_frozen_matrices_with_adapters_are_in_8_bits_and_adapters_are_not(fp8: str, settings: dict[str, Any]) -> None:
    report = inspect(tiny(fp8=fp8, lora_rank=16, **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert report.float8 is not None
    # A frozen matrix has no gradient: 4 forward, 3 recomputed, 4 backward.
    assert (report.float8.found, report.float8.expected) == (11 * 3 * (1 if fp8 == "rowwise" else 2),) * 2


@needs_aot
@pytest.mark.long
def test_a_matmul_in_16_bits_is_a_violation_unless_its_sizes_are_no_multiples_of_16() -> None:
    settings = {"mesh": "2x4", "fp8": "delayed", "mlp_size": 88}
    report = inspect(tiny(**settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert report.float8 is not None and report.float8.found == 8 * 3 * 2  # of attention: 2, 2 again, 4 backward
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(xla_options, "FLOAT8", ())
        report = inspect(tiny(**settings), find_target("h100x8"))
    assert report.float8 is not None and report.float8.found == 0
    assert "matmuls" in report.verdict.violations[0]
    assert "are of bf16 instead of 8-bit floats" in report.verdict.violations[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"mesh": "data=2,stage=2,model=2", "num_layers": 4, "fp8": "delayed"},
        pytest.param(
            {"mesh": "data=2,stage=2,model=2", "num_layers": 4, "fp8": "tensorwise", "recompute": "none"},
            marks=pytest.mark.exhaustive,
        ),
        {"mesh": "data=2,shard=2,model=2", "zero": 3, "fp8": "delayed"},
        pytest.param(
            {"mesh": "data=2,context=2,model=2", "position": "rope", "fp8": "delayed", "recompute": "none"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_contracts_hold_with_other_axes_on_cpus(settings: dict[str, Any]) -> None:
    assert inspect(tiny(**settings), find_target("cpu")).verdict.violations == ()
