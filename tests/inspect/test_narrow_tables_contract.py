"""Contracts and FLOPs of what stands between the embedding and the layers: matrices of narrow tables, and norms."""

from typing import Any

import pytest

from mtjax.generate.inspected import inspect_decoding
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.verify import compare
from tests.inspect.steps import needs_aot, tiny
from tests.tiny import tiny_config

pytestmark = pytest.mark.long
NARROW: dict[str, Any] = {"norm_placement": "post", "embedding_size": 48}
STAGES: dict[str, Any] = {"mesh": "2x2x2", "num_layers": 4, "sequence_parallel": True}


@needs_aot
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"sequence_parallel": True, "zero": 3}, marks=pytest.mark.exhaustive),
        {**STAGES, "zero": 1},
        pytest.param({"mesh": "data=1,context=2,model=2"}, marks=pytest.mark.exhaustive),
        pytest.param({"tie_embeddings": False, "zero": 2, "sequence_parallel": True}, marks=pytest.mark.exhaustive),
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_narrow_tables_on_h100(fields: dict[str, Any]) -> None:
    report = inspect(tiny(**NARROW, **fields), find_target("h100x8"))
    assert report.verdict.violations == ()
    off = {check.name: check.error for check in compare(report)}
    assert off["parameters"] == 0
    # Idle ticks of the first stage compute embeddings, too, which the formula leaves out.
    assert abs(off["FLOPs of a step"]) < (0.005 if "num_layers" in fields else 1e-6)


@pytest.mark.parametrize(
    "normed",
    [
        {"embedding_norm": True},
        pytest.param({"family": "bert", "norm_placement": "post"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_stages_look_rows_up_again_for_the_norm_of_embeddings(normed: dict[str, Any]) -> None:
    report = inspect(tiny(**normed, **STAGES), find_target("cpu"))
    assert report.verdict.violations == ()


def test_a_decode_step_sends_rows_of_the_tables_width() -> None:
    config = tiny_config(mesh="1x4", sequence_length=64, **NARROW | {"embedding_size": 24})
    report = inspect_decoding(config, find_target("cpu"), 4, 64)
    assert report.verdict.holds and not report.verdict.tolerated, report.verdict.violations
