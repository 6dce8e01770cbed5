"""The paper's largest model on its own mesh, compiled for GPUs that are not there."""

import time

import pytest

from mtjax import config
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import needs_aot, tiny


@pytest.mark.long
@pytest.mark.usefixtures("assembled")
@needs_aot
def test_the_8_3b_model_on_512_gpus():
    """Figure 4 in 72 layers: 144 all-reduces forward, 72 recomputed, 144 backward, each of 8 x 1024 x 3072."""
    start = time.process_time()
    report = inspect(config.load("gpt2-8.3b"), find_target("h100x8"))
    seconds = time.process_time() - start
    assert report.verdict.violations == ()
    layer = {
        phase: sum(c.count for c in report.collectives if c.phase == phase and c.elements == 8 * 1024 * 3072)
        for phase in ("layer forward", "layer recompute", "layer backward")
    }
    assert layer == {"layer forward": 144, "layer recompute": 72, "layer backward": 144}
    assert {c.servers for c in report.collectives if c.axes == ("model",)} == {1}
    assert {c.servers for c in report.collectives if c.axes == ("data",)} == {64}
    assert report.flops.difference == pytest.approx(0, abs=0.01)
    assert report.memory.fits
    assert report.memory.peak == pytest.approx(21.3e9, rel=0.05)
    assert seconds < 2 * 40  # of two cores: 40 s on the clock of an idle machine


@pytest.mark.long
@pytest.mark.usefixtures("assembled")
@needs_aot
@pytest.mark.parametrize(
    "target",
    [
        "a100x8",
        pytest.param("b200x8", marks=pytest.mark.exhaustive),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("a100-40x8", "h200x8")),
    ],
)
def test_every_compile_target_keeps_the_contract(target):
    report = inspect(tiny(num_layers=2, attention="xla"), find_target(target))
    assert report.verdict.violations == ()
    assert report.flops.difference == pytest.approx(0, abs=0.01)
    assert report.memory.fits
    assert report.time is not None
