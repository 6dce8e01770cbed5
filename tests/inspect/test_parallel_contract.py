"""Contracts of parallel layers, whose attention and MLP read the same hidden states: on GPUs the sum of their outputs
is reduced over tensor parallel ranks once, and where both read one norm, the sum of their input gradients."""

from typing import Any

import pytest

from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny
from tests.inspect.test_contract import sent

PARALLEL: dict[str, Any] = {"parallel_residual": "one_norm", "position": "rope", "mlp_size": 176, "attention": "xla"}


def reduced(settings: dict[str, Any], target: str) -> list[int]:
    """How often a layer reduces an array of the hidden states' size, forward and backward."""
    report = inspect(tiny(**PARALLEL | settings), find_target(target))
    assert report.verdict.violations == ()
    known, splits = report.symbols, report.config.parallel.sequence_parallel
    size, times = known["batch"] * known["sequence"] * known["hidden"], known["layers"] * known["microbatches"]
    sums = ("reduce-scatter" if splits else "all-reduce", size)
    found = (sent(report, f"layer {phase}") for phase in ("forward", "backward"))
    return [sum(n for key, n in one.items() if key[:2] == sums) // times for one in found]


@needs_aot
@pytest.mark.parametrize(
    ("settings", "backward"),
    [
        pytest.param({"num_kv_heads": 2, "sequence_parallel": True}, 1, marks=pytest.mark.exhaustive),
        pytest.param({"parallel_residual": "two_norms", "recompute": "none"}, 2, marks=pytest.mark.long),
        pytest.param({"recompute": "none", "num_layers": 2, "unroll_layers": True}, 1, marks=pytest.mark.long),
        pytest.param({"mesh": "data=2,context=2,model=2", "zero": 3}, 1, marks=pytest.mark.exhaustive),
    ],
    ids=["split sequences", "two norms", "unrolled", "context, ZeRO-3"],
)
def test_a_parallel_layer_reduces_once_on_h100(settings: dict[str, Any], backward: int) -> None:
    assert reduced(settings, "h100x8") == [1, backward]


@pytest.mark.long
def test_a_parallel_layer_reduces_both_sums_on_cpus() -> None:
    assert reduced({"num_layers": 2, "compute_dtype": "float32"}, "cpu") == [2, 2]
