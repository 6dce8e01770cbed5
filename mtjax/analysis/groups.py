"""What sharding groups change in a contract: ZeRO's collectives are within a group, and gradients also cross groups."""

from collections.abc import Sequence
from dataclasses import replace

from mtjax.analysis.contract import GRADIENTS, JOINED, Dtype, Expectation, Symbols
from mtjax.layout.plan import Plan
from mtjax.layout.rules import Axes

ZERO_DEGREE, EXPERT_ZERO_DEGREE = "zero_degree", "expert_zero_degree"
"""Symbols: ranks over which ZeRO shards a parameter, and experts' matrices."""


def across_groups(
    lines: Sequence[Expectation], between: Axes, of: str, comm_dtype: Dtype, degree: str = ZERO_DEGREE
) -> Sequence[Expectation]:
    """Returns the lines of a step whose sharding groups are replicas of each other.

    Args:
      lines: what ranks of a group send each other; all-reduces are of gradients that ZeRO does not shard.
      between: mesh axes between groups; () without groups.
      of: symbol of the trained parameters.
      comm_dtype: type in which gradients are reduced.
      degree: symbol of the shards of a parameter.

    Returns:
      The same lines, with the all-reduces also over `between`; and the all-reduce of the shards' gradients over it.
    """
    if not between:
        return lines
    every = [
        replace(line, axis=JOINED.join((*between, line.axis))) if line.kind == "all-reduce" else line for line in lines
    ]
    why = "each rank's part of the gradients, which other groups have too, once a step"
    elements = f"({of} - unsplit_{of})/{degree}"
    shards = Expectation(GRADIENTS, "all-reduce", JOINED.join(between), "1", elements, comm_dtype, pooled=True, why=why)
    return [*every, shards]


def group_symbols(plan: Plan) -> Symbols:
    """Returns the symbols of the line above; {} without groups."""
    return (
        {ZERO_DEGREE: plan.zero_degree, EXPERT_ZERO_DEGREE: plan.expert_zero_degree}
        if plan.mesh.has_sharding_groups
        else {}
    )
