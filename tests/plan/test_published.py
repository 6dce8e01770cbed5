"""The honesty rule: one set of constants, set without the predicted points, and every gap in the docs."""

import math
import re
import statistics
from pathlib import Path

import pytest

from mtjax.plan import published
from mtjax.theory.timing import Constants

DOCS = Path(__file__).parents[2] / "docs" / "plan.md"


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


@pytest.mark.parametrize("scale", [published.figure_5, published.h100_weak_scaling, published.a100_weak_scaling])
def test_every_gap_stands_in_the_docs(scale):
    text = DOCS.read_text()
    for p in scale():
        is_share = p.published <= 1
        predicted = f"{p.predicted:.1%}" if is_share else f"{p.predicted:.0f}"
        gap = f"{100 * p.gap:+.1f}" if is_share else f"{p.predicted / p.published - 1:+.1%}"
        row = rf"\| {re.escape(p.name)}[^|]*\|[^|]*\| {re.escape(predicted)} \| {re.escape(gap)}"
        assert re.search(row, text), f"docs/plan.md lacks {p.name}: {predicted}, {gap}"
