"""What layers of several kinds hide of their communication over data ranks, where each hides that of its neighbours."""

from collections.abc import Mapping
from itertools import pairwise

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.counts import layer_counts
from mtjax.config.layer_pattern import joined_loops
from mtjax.layout.plan import Plan

BEFORE_GATHER = {"none": 0.2, "selective": 0.2, "full": 0.45}
"""Share of a backward pass before the gradient of the matrix that a layer reads last, by recompute: read off two
programs."""


def is_mixed(anatomy: Anatomy, plan: Plan) -> bool:
    """Returns whether layers of several kinds prefetch for each other."""
    is_pattern = not all(stack.has_own_loop for stack in anatomy.stacks)
    return is_pattern and plan.prefetches(anatomy.model)


def exposed_in_pattern(
    anatomy: Anatomy, plan: Plan, sent: tuple[float, float, float], computing: Mapping[str, float], latency: float
) -> float:
    """Returns the seconds of a step in which layers wait for parameters and sums of gradients over data ranks.

    A layer's computing hides the gather of the layer after it, in the backward pass that of the layer before it and the
    sums of the layer after it. The gather of the first layer is hidden by nothing, nor are its sums.

    Args:
      anatomy: of the model.
      plan: of its run.
      sent: seconds of the layers' gathers in the forward pass, in the backward pass, and of their sums.
      computing: seconds of a layer of each letter in a step, all passes.
      latency: seconds that each of a layer's collectives takes in a step whatever its size: `sent` has those of all
        layers at once.
    """
    pattern, layout = anatomy.stacks[0].pattern, plan.layout(anatomy.model)
    elements = {stack.letter: layer_counts(stack, layout, plan.mesh).all for stack in anatomy.stacks}
    every = sum(elements[letter] for letter in pattern)
    # By elements, so each letter's latency is added: a small layer's collective does not take a share of a large one's.
    gathers, again, sums = (
        {
            letter: part * letter_elements / every + (latency if part else 0.0)
            for letter, letter_elements in elements.items()
        }
        for part in sent
    )
    ahead = 1 / (4 if plan.recompute == "full" else 3)
    exposed = gathers[pattern[0]] + sums[pattern[0]]
    exposed += sum(max(0.0, gathers[after] - ahead * computing[letter]) for letter, after in pairwise(pattern))
    # In its backward pass each iteration of a loop gathers the layer below it; the first iteration, which has none
    # below, gathers one in vain.
    first = joined_loops(pattern)[0]
    below = (first.unit[-1] if first.times > 1 else None, *pattern[:-1])
    for letter, under, above in zip(pattern, below, (*pattern[1:], None), strict=True):
        back = (1 - ahead) * computing[letter]
        exposed += _behind(plan, back, sums[above] if above else 0.0, again[under] if under else 0.0)
    return exposed


def _behind(plan: Plan, back: float, sums: float, gather: float) -> float:
    """Returns the seconds of sums and of a gather, one after the other, that a backward pass of `back` seconds does not
    hide; beside tensor parallel collectives the gather waits for the gradient of one matrix."""
    if plan.mesh.model == 1 or not gather:
        return max(0.0, sums + gather - back)
    before = BEFORE_GATHER[plan.recompute] * back
    return max(0.0, sums - before) + max(0.0, gather - (back - before))
