"""To how many ranks tokens go, beside all choices of experts that there are, and how long that takes."""

from dataclasses import replace
from itertools import combinations

import pytest

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.parts.experts import exchanged_share
from mtjax.analysis.timing import step_time
from mtjax.config import Model
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan


@pytest.mark.parametrize(
    ("experts", "top_k", "ways", "groups", "kept"),
    [(8, 2, 8, 1, 1), (8, 3, 4, 1, 1), (6, 6, 2, 1, 1), (12, 3, 2, 4, 2), (12, 3, 4, 4, 3), (12, 3, 6, 3, 1)],
)
def test_a_token_goes_to_the_ranks_of_its_experts_each_counted_once(experts, top_k, ways, groups, kept):
    model = Model(num_experts=experts, experts_top_k=top_k, expert_groups=groups, expert_groups_top_k=kept)
    size, found = experts // groups, []
    for best in combinations(range(groups), kept):
        there = [expert for group in best for expert in range(group * size, (group + 1) * size)]
        found += [len({expert * ways // experts for expert in choice}) for choice in combinations(there, top_k)]
    assert exchanged_share(model, ways) == pytest.approx(sum(found) / len(found) / ways)


@pytest.mark.parametrize("mesh", ["data=2,expert=8,model=1", "data=1,stage=2,expert=8,model=1"])
def test_an_exchange_lasts_until_the_rank_with_most_has_its_tokens(mesh):
    run = config.replace(config.load("mixtral-8x7b"), expert_dispatch="all-to-all")
    plan = Plan.of(run, parse_mesh(mesh))
    even, uneven = (
        step_time(anatomy_of(run.model), replace(plan, expert_imbalance=load), DGX_H100) for load in (1.0, 1.5)
    )
    assert 1.45 < uneven.expert_axis / even.expert_axis < 1.5
