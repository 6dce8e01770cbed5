"""To how many ranks tokens go, beside all choices of experts that there are."""

from itertools import combinations

import pytest

from mtjax.config import Model
from mtjax.theory.parts.experts import exchanged_share


@pytest.mark.parametrize(
    ("experts", "top_k", "ways", "groups", "kept"),
    [(8, 2, 8, 1, 1), (8, 3, 4, 1, 1), (6, 6, 2, 1, 1), (12, 3, 2, 4, 2), (12, 3, 4, 4, 3), (12, 3, 6, 3, 1)],
)
def test_a_token_goes_to_the_ranks_of_its_experts_each_counted_once(experts, top_k, ways, groups, kept):
    model = Model(num_experts=experts, experts_top_k=top_k, expert_groups=groups, expert_groups_kept=kept)
    size, found = experts // groups, []
    for best in combinations(range(groups), kept):
        there = [expert for group in best for expert in range(group * size, (group + 1) * size)]
        found += [len({expert * ways // experts for expert in choice}) for choice in combinations(there, top_k)]
    assert exchanged_share(model, ways) == pytest.approx(sum(found) / len(found) / ways)
