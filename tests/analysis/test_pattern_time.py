"""What layers of several kinds hide of their neighbours' communication, counted by hand."""

from typing import Any

import pytest

from mtjax import config
from mtjax.analysis import link_time
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.machine import Machine
from mtjax.analysis.pattern_time import BEFORE_GATHER, exposed_in_pattern
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

RUN: dict[str, Any] = {"family": "hybrid", "layer_pattern": "(*-)x3", "num_layers": 6, "hidden_size": 64}
RUN |= {"num_heads": 4, "vocab_size": 256, "zero": 3, "recompute": "full", "global_batch_size": 4, "microbatch_size": 1}
ATTENTION, MLP, LATENCY = 4 * 64**2, 8 * 64**2, 0.25
"""Elements of matrices of a layer, to which norms add little."""


@pytest.mark.parametrize("mesh", ["4x1", "4x2", "data=1,context=4"])
def test_a_layer_hides_what_its_neighbours_send(mesh):
    run = config.replace(config.Config(), **RUN, mesh=mesh)
    plan, anatomy = Plan.of(run, parse_mesh(mesh)), anatomy_of(run.model)
    total = 3.0 * (ATTENTION + MLP)
    # A layer with attention is gathered in 1 + 1/4 s, reduced in 2 + 1/4, and computes 1 + 3 s; an MLP 2, 4, 2 + 6.
    each = total / ATTENTION
    sent = (each, each, 2 * each)
    found = exposed_in_pattern(anatomy, plan, sent, {"*": 4.0, "-": 8.0}, LATENCY)
    first, forward = 1.25 + 2.25, 3 * (2.25 - 1)
    if plan.mesh.model == 1:
        # Attention's 3 s hide an MLP's sums and gather but for 3.5 s; the last iteration gathers an MLP for nothing.
        # An MLP's 6 s hide 2.25 and 1.25 of the layers with attention.
        back = 3 * (4.25 + 2.25 - 3)
    else:
        before = BEFORE_GATHER["full"] * 3
        back = 3 * (4.25 - before + 2.25 - (3 - before))
    assert found == pytest.approx(first + forward + back, rel=0.03)


@pytest.mark.parametrize(
    ("mesh", "degree"), [("8x1", 8), ("data=2,context=4", 8), ("data=1,context=8", 8), ("4x2", 4), ("1x8", 1)]
)
def test_collectives_wait_for_all_ranks_over_which_gradients_are_reduced(mesh, degree, monkeypatch):
    """ZeRO shards over data, context and expert parallel ranks together."""
    latencies = []
    monkeypatch.setattr(link_time, "exposed_in_pattern", lambda *arguments: latencies.append(arguments[-1]) or 0.0)
    run = config.replace(config.Config(), **{**RUN, "global_batch_size": 8}, mesh=mesh)
    plan, machine = Plan.of(run, parse_mesh(mesh)), Machine(DGX_H100)
    link_time.exposed_ahead(anatomy_of(run.model), plan, machine, 1.0, {"*": 4.0, "-": 8.0})
    alone = Machine(DGX_H100).transfer(link_time.Transfer("data", degree, "all-gather", "", 1, 1, 1), degree)
    assert latencies == [pytest.approx(plan.microbatches * alone)]
    assert (alone > 0) == (degree > 1)
