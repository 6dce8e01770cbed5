"""Plots show the numbers of the flops."""

import pytest
from matplotlib.figure import Figure

from mtjax.analysis.anatomy import gpt
from mtjax.analysis.flops import amdahl_speedup
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.memory import peak_stage_memory
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.plan import plots, published

SHAPE = gpt(24, 1024, 16, 1024, 51_200)
PLAN = Plan(parse_mesh("8x1x2"), 64, 8, recompute="full")


def axes():
    return Figure().subplots()


def test_bars_stack_to_the_total():
    found = axes()
    plots.memory_by_mesh(found, SHAPE, PLAN, DGX_H100, 0.9)
    choices = plots.mesh_choices(SHAPE, PLAN, DGX_H100)
    assert [str(p.mesh) for p in choices] == ["16x1", "8x2", "4x4", "2x8"]
    tops = [max(bar.get_y() + bar.get_height() for bar in group) for group in zip(*found.containers, strict=True)]
    for plan, top in zip(choices, tops, strict=True):
        memory = peak_stage_memory(SHAPE, plan)
        assert top == pytest.approx(sum(plots.memory_parts(memory).values()))
        assert top * 2**30 >= memory.total


def test_weak_scaling_shows_the_papers_points():
    found = axes()
    plots.weak_scaling(found)
    paper = [y for line in found.lines[::2] for y in line.get_ydata()]
    assert paper == pytest.approx([100 * p.published for p in published.figure_5()])


def test_strong_scaling_stays_below_ideal():
    found = axes()
    plots.strong_scaling(found, SHAPE, PLAN, DGX_H100, 0.01)
    model, ideal, bound = (list(line.get_ydata()) for line in found.lines)
    assert all(m <= i * 1.001 for m, i in zip(model, ideal, strict=True))
    assert bound[-1] == pytest.approx(amdahl_speedup(0.01, ideal[-1]))


@pytest.mark.parametrize("mesh", ["data=2,shard=4,model=1", "data=2,context=2,model=2"])
def test_a_replica_has_all_ranks_but_those_of_data(mesh):
    """A group of 4 ranks shares the batch of 64, so that there are up to 16; context parallel ranks do not."""
    found, plan = axes(), Plan(parse_mesh(mesh), 64, 8, zero=1)
    plots.strong_scaling(found, SHAPE, plan, DGX_H100, 0.01)
    times, ideal, _ = found.lines
    most = 16 if "shard" in mesh else 64
    assert list(ideal.get_ydata()) == [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    assert list(times.get_xdata()) == [4 * n for n in ideal.get_ydata()]
