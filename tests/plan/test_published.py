"""The honesty rule: one set of constants, set without the predicted points, and every gap in the docs."""

import math
import re
import statistics
from pathlib import Path

import pytest

from mtjax.analysis.accuracy import A100, H100, V100, accuracy_on
from mtjax.analysis.anatomy import gpt
from mtjax.analysis.hardware import DGX_2H, DGX_A100_80, DGX_H100
from mtjax.analysis.machine import Constants
from mtjax.analysis.software import MEGATRON_2021
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import MEGATRON_FP16, Plan
from mtjax.plan import published

DOCS = Path(__file__).parents[2] / "docs" / "notes" / "plan.md"


def test_the_one_fitted_constant_comes_from_the_a100_runs_alone():
    def bias(training: float) -> float:
        points = published.a100_weak_scaling(Constants(training=training))
        return statistics.mean(math.log(p.predicted / p.published) for p in points)

    assert bias(Constants().training - 0.01) < 0 < bias(Constants().training + 0.01)


def test_the_a100_runs_lie_within_six_percent():
    assert all(abs(p.predicted / p.published - 1) < 0.06 for p in published.a100_weak_scaling())


def test_one_v100_comes_out_without_a_constant_of_its_own():
    base = published.figure_5_base()
    assert base.predicted == pytest.approx(base.published, rel=0.07)


def test_figure_5_starts_at_one_and_falls_with_model_ways():
    points = published.figure_5()
    assert points[0].predicted == 1
    for part in (points[:4], points[4:]):
        assert [p.predicted for p in part] == sorted((p.predicted for p in part), reverse=True)


def test_runs_that_were_never_looked_at_lie_within_thirty_percent():
    points = [*published.composer_h100(), published.megatron_v1()]
    assert all(abs(p.predicted / p.published - 1) < 0.3 for p in points)


def test_megatron_core_lies_near_fifteen_percent_but_for_the_smallest():
    smallest, *others = (p.predicted / p.published - 1 for p in published.h100_weak_scaling())
    assert all(abs(gap) < 0.155 for gap in others) and smallest < 0.29


def test_ranges_are_those_of_the_published_runs():
    base, v1 = published.figure_5_base(), published.megatron_v1()
    on_v100 = [*published.figure_5(), *published.figure_5_fixed_batch()]
    runs = {
        V100: [*(base.predicted / base.published * ratio(p) for p in on_v100), ratio(v1)],
        A100: [ratio(p) for p in published.a100_weak_scaling()],
        H100: [ratio(p) for p in (*published.h100_weak_scaling(), *published.composer_h100())],
    }
    for accuracy, ratios in runs.items():
        assert accuracy.least <= min(ratios) < accuracy.least + 0.01
        assert accuracy.most - 0.01 < max(ratios) <= accuracy.most
    assert [len(ratios) for ratios in runs.values()] == [12, 10, 25]
    assert accuracy_on(DGX_H100).around(1.0) == (H100.least, H100.most) and accuracy_on(DGX_2H) == V100


def ratio(point: published.Point) -> float:
    """Published time over predicted time."""
    return point.predicted / point.published


def test_chunks_divide_whatever_number_of_layers_a_stage_has():
    """23 layers on each of 2 stages: 23 chunks of one layer, or one of all."""
    anatomy = gpt(46, 4096, 32, 2048, 51_200)
    plan = Plan(parse_mesh("8x2x8"), 32, 1, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
    best = published._fastest(anatomy, plan, (1,), DGX_A100_80, MEGATRON_2021, None)
    assert (best.pipeline_schedule, best.chunks) == ("interleaved", 23)


@pytest.mark.parametrize(
    "scale",
    [published.figure_5, published.h100_weak_scaling, published.a100_weak_scaling, published.composer_h100],
)
def test_every_gap_stands_in_the_docs(scale):
    text = DOCS.read_text()
    for p in scale():
        is_share = p.published <= 1
        predicted = f"{p.predicted:.1%}" if is_share else f"{p.predicted:.0f}"
        gap = f"{100 * p.gap:+.1f}" if is_share else f"{p.predicted / p.published - 1:+.1%}"
        row = rf"\| {re.escape(p.name)}[^|]*\|[^|]*\| {re.escape(predicted)} \| {re.escape(gap)}"
        assert re.search(row, text), f"docs/notes/plan.md lacks {p.name}: {predicted}, {gap}"
