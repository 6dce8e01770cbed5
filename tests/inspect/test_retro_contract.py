"""The contract of a Retro, and formulas beside the programs that XLA compiles for H100s."""

from typing import Any

import pytest

from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.verify import compare
from tests.inspect.steps import needs_aot, tiny

RETRO: dict[str, Any] = {
    "family": "retro",
    "num_layers": 6,
    "retro_first": 2,
    "retro_every": 2,
    "retro_chunk": 16,
    "retro_encoder_dropout": 0.0,
}
SPLIT = {"sequence_parallel": True}
LONG, RARE = pytest.mark.long, pytest.mark.exhaustive


@needs_aot
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({**SPLIT, "zero": 1}, marks=LONG),
        pytest.param({}, marks=RARE),
        pytest.param({"recompute": "none", "microbatch_size": 4, "zero": 3}, marks=RARE),
        pytest.param({**SPLIT, "zero": 1, "retro_frozen": "encoder"}, marks=RARE),
        pytest.param({**SPLIT, "zero": 1, "retro_frozen": "retrieval"}, marks=RARE),
        pytest.param({**SPLIT, "zero": 1, "retro_frozen": "retrieval", "retro_reads": False}, marks=RARE),
        pytest.param({**SPLIT, "zero": 1, "retro_frozen": "decoder"}, marks=RARE),
        pytest.param({"zero": 1, "retro_frozen": "decoder"}, marks=RARE),
    ],
)
def test_programs_for_h100_keep_their_contracts(fields: dict[str, Any]) -> None:
    report = inspect(tiny(**RETRO, **fields), find_target("h100x8"))
    assert report.verdict.violations == ()
    checks = {check.name: check for check in compare(report)}
    for name in ("parameters", "FLOPs of a step", "weights"):
        assert checks[name].formula == checks[name].program, name
    step_counter = 8
    assert checks["optimizer"].program - checks["optimizer"].formula == step_counter
    # The optimizer's scalars, which no formula has.
    sent = [check for name, check in checks.items() if name.startswith("sent")]
    assert all(abs(check.program - check.formula) <= 0.001 * check.program for check in sent), sent
