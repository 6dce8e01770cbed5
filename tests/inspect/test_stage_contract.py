"""What the stages of a pipeline send, in compiled programs: each permute in ticks, and nothing else between stages."""

from typing import Any

import pytest

from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.theory.contract import STAGES
from tests.inspect.steps import needs_aot, tiny

ONE_BY_ONE: dict[str, Any] = {"mesh": "2x2x2", "num_layers": 4, "microbatch_size": 1, "global_batch_size": 16}
"""8 microbatches on 2 stages: 9 ticks forward and 9 backward; s = 64, h = 64."""
SPLIT = {"recompute": "full", "sequence_parallel": True, "zero": 1}
HALF_STREAM = 64 * 64 // 2


def permutes(report: Report) -> dict[tuple[int, str], int]:
    """(elements, type) -> executions of collective-permutes, all of them over `stage`."""
    found: dict[tuple[int, str], int] = {}
    for c in report.collectives:
        if c.kind == "collective-permute":
            assert c.axes == ("stage",) and c.phase == STAGES
            for array in c.arrays:
                key = (array.elements, array.dtype)
                found[key] = found.get(key, 0) + c.count
    return found


@pytest.mark.parametrize(
    "settings",
    [
        SPLIT,
        {"recompute": "none"},
        pytest.param({"recompute": "full", "zero": 3}, marks=pytest.mark.long),
        pytest.param({"recompute": "none", "sequence_parallel": True, "zero": 2}, marks=pytest.mark.long),
    ],
    ids=["split sequences, ZeRO-1", "residuals kept", "ZeRO-3", "residuals kept, split, ZeRO-2"],
)
def test_contracts_hold_on_cpus(settings: dict[str, Any]) -> None:
    report = inspect(tiny(**ONE_BY_ONE, **settings), find_target("cpu"))
    assert report.verdict.violations == ()
    ((elements, _), count) = next(iter(permutes(report).items()))  # CPU programs may widen what is sent
    assert (elements, count, len(permutes(report))) == (HALF_STREAM, 18, 1)
    assert abs(report.flops.difference) < 0.01


@needs_aot
@pytest.mark.parametrize(
    ("settings", "halves"),
    [
        (SPLIT, 18),
        ({"recompute": "selective", "schedule": "interleaved", "chunks": 2}, 2 * 17),
        ({"recompute": "full", "schedule": "gpipe", "zero": 3, "layers_per_stage": (1, 3)}, 18),
        ({"recompute": "none", "family": "bert", "sequence_parallel": True, "zero": 2}, 18),
    ],
    ids=["1f1b, split sequences, ZeRO-1", "interleaved", "gpipe, ZeRO-3, unequal stages", "BERT, residuals kept"],
)
def test_contracts_hold_on_h100s(settings: dict[str, Any], halves: int) -> None:
    """Operations and bytes; the stream travels in parts, also where all model ranks have all of it."""
    report = inspect(tiny(**ONE_BY_ONE, **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert permutes(report) == {(HALF_STREAM, "bf16"): halves}


@needs_aot
def test_permutes_travel_behind_layers_on_h100s() -> None:
    """In the steady state: gradients behind the forward half, activations behind the backward half."""
    report = inspect(
        tiny(**{**ONE_BY_ONE, "mesh": "2x4x2", "hidden_size": 256, "num_layers": 8}, **SPLIT),
        find_target("h100x8"),
    )
    assert report.stages is not None
    for permutes in report.stages.permutes:
        assert permutes.hidden >= 8 - 3, permutes
