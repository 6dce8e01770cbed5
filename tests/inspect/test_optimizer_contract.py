"""Contracts of optimizers on compiled programs: Muon's exchanges and products, Adafactor's averages."""

from typing import Any

import pytest

from mtjax.analysis.counts import stage_weights
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.verify import compare
from mtjax.layout.layouts import LAYERS
from tests.inspect.steps import needs_aot, tiny

MUON: dict[str, Any] = {"optimizer": "muon", "num_layers": 3, "zero": 1}
ADAFACTOR: dict[str, Any] = {"optimizer": "adafactor", "hidden_size": 512, "zero": 1, "mesh": "2x2", "num_layers": 2}


def check(settings: dict[str, Any], target: str) -> None:
    """The contract holds, FLOPs are those of the formula, and so are the states' bytes but for counters."""
    report = inspect(tiny(**settings), find_target(target))
    assert report.verdict.violations == ()
    lines = [line for line in report.verdict.lines if "updates_over" in line.required.line.elements]
    assert len(lines) == 2 and all(line.found_elements >= line.required.total > 0 for line in lines)
    assert report.time is None or report.time.by_plan > 0
    checks = {one.name: one for one in compare(report)}
    assert checks["FLOPs of a step"].formula == checks["FLOPs of a step"].program
    assert 0 <= checks["optimizer"].program - checks["optimizer"].formula <= 16


@needs_aot
@pytest.mark.parametrize(
    "settings", [pytest.param(MUON, marks=pytest.mark.exhaustive), ADAFACTOR], ids=["muon", "adafactor"]
)
def test_updates_on_h100(settings: dict[str, Any]) -> None:
    check(settings, "h100x8")


STAGES: dict[str, Any] = {"mesh": "1x2x2", "layers_per_stage": (2, 1)}


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"zero": 3, "sequence_parallel": True, "microbatch_size": 4},
        pytest.param({"mesh": "4x2"}, marks=pytest.mark.exhaustive),
    ],
)
def test_largest_scores_leave_the_layers_with_the_gradients(settings: dict[str, Any]) -> None:
    """A number for each of 20 layers and 64 heads crosses once, over data parallel ranks, and then over tensor ones."""
    sizes = {"num_layers": 20, "num_heads": 64, "hidden_size": 512, "attention": "xla"}
    report = inspect(tiny(qk_clip=100.0, **sizes, **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    lines = {line.required.line.elements: line for line in report.verdict.lines}
    (gathered,) = (lines[elements] for elements in lines if elements == "all_scores")
    assert gathered.found_elements == gathered.required.total == 20 * 64
    checks = {one.name: one for one in compare(report)}
    assert checks["FLOPs of a step"].formula == checks["FLOPs of a step"].program


@needs_aot
@pytest.mark.parametrize(
    "settings", [{"zero": 3, "mesh": "4x2"}, pytest.param(STAGES, marks=pytest.mark.exhaustive)], ids=str
)
def test_offloaded_states_cross_to_the_host_and_back(settings: dict[str, Any]) -> None:
    """Moments once, 8 bytes a parameter of the device each way, and master weights another time for their copies; none
    of them stay on the device. In layers, arrays are read while others are written. The update divides where it does
    without: XLA may multiply by an inverse instead, which rounds otherwise."""
    wide: dict[str, Any] = {"num_layers": 6, "hidden_size": 512, "compute_dtype": "bfloat16", **settings}
    plain, moments, both = (
        inspect(tiny(offload=kind, **wide), find_target("h100x8"))
        for kind in ("none", "optimizer", "optimizer,parameters")
    )
    of_moments, masters = plain.memory.optimizer - 8, plain.memory.parameters  # and two counters
    memory = moments.memory
    assert moments.verdict.violations == both.verdict.violations == ()
    assert memory.optimizer == 8 and memory.host == memory.host_reads == memory.host_writes == of_moments
    assert plain.memory.arguments - memory.arguments == of_moments
    assert plain.memory.temporaries * 1.1 > memory.temporaries
    memory = both.memory
    assert (memory.parameters, memory.optimizer) == (0, 8)
    assert memory.host == memory.host_writes == of_moments + masters
    assert memory.host_reads == of_moments + 2 * masters
    assert memory.peak < moments.memory.peak - masters / 4
    for memory in (moments.memory, both.memory):
        assert 0.99 * memory.host_exposed_formula < memory.host_exposed <= memory.host_exposed_formula
        assert memory.host_exposed < 0.95 * (memory.host_reads + memory.host_writes)
    divisions = [report.step.text.count(" divide(") for report in (plain, moments, both)]
    # Both moments of each stack are divided by a bias correction in the loop, and for the last layer outside it.
    stacks = sum(weight.names[0] == LAYERS for weight in stage_weights(plain.step.anatomy, plain.step.plan, 0))
    assert divisions[1] == divisions[2] == divisions[0] + 2 * stacks


@needs_aot
@pytest.mark.parametrize(
    "zero", [pytest.param(0, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.exhaustive), 3]
)
def test_master_weights_in_bfloat16_are_what_is_gathered(zero: int) -> None:
    """The contract of float32 masters holds; parameters have half of their bytes, and nothing casts or copies more."""
    settings = {"zero": zero, "mesh": "4x2", "num_layers": 3, "compute_dtype": "bfloat16"}
    wide, narrow = (
        inspect(tiny(master_dtype=kind, **settings), find_target("h100x8")) for kind in ("float32", "bfloat16")
    )
    assert narrow.verdict.violations == ()
    assert narrow.memory.parameters == round(narrow.memory.formula.weights) < 0.6 * wide.memory.parameters
    assert narrow.memory.temporaries <= wide.memory.temporaries * 1.02


@pytest.mark.parametrize(
    "settings", [{**MUON, "mesh": "2x2", "compute_dtype": "float32", "recompute": "none"}], ids=["muon"]
)
def test_updates_on_cpus(settings: dict[str, Any]) -> None:
    check(settings, "cpu")
