"""What a student's step sends besides its own: seven numbers a token, and no logits of either model."""

import pytest

from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny
from tests.inspect.test_contract import sent

TAUGHT = {"teacher": "a test", "teacher_width": 96, "mesh": "2x4"}


def check(target: str, **settings) -> None:
    report = inspect(tiny(**TAUGHT | settings), find_target(target))
    assert report.verdict.violations == ()
    assert report.contract.name.endswith("teacher")
    scalars = {array: n for array, n in sent(report, "loss forward").items() if array[0] == "all-reduce"}
    assert sum(elements * n for (_, elements, _), n in scalars.items()) == 7 * 2 * 64 * 2
    assert max(elements for _, elements, _ in scalars) <= 5 * 2 * 64


@pytest.mark.long
def test_no_logits_travel_on_cpus() -> None:
    check("cpu", num_layers=2)


@needs_aot
@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{}, {"sequence_parallel": True, "zero": 3}])
def test_no_logits_travel_on_h100(settings) -> None:
    check("h100x8", **settings)
