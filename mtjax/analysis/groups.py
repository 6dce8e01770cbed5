"""What sharding groups change in a contract: ZeRO's collectives are within a group, and gradients also cross groups."""

from collections.abc import Sequence
from dataclasses import replace

from mtjax.analysis.contract import GRADIENTS, JOINED, Dtype, Expectation, Symbols
from mtjax.layout.plan import Plan
from mtjax.layout.rules import Axes

WAYS, EXPERT_WAYS = "zero_ways", "expert_zero_ways"
"""Symbols: ranks over which ZeRO shards a parameter, and experts' matrices."""


def across_groups(
    lines: Sequence[Expectation], between: Axes, of: str, wire: Dtype, ways: str = WAYS
) -> Sequence[Expectation]:
    """Returns the lines of a step whose sharding groups are replicas of each other.

    Args:
      lines: what ranks of a group send each other; all-reduces are of gradients that ZeRO does not shard.
      between: mesh axes between groups; () without groups.
      of: symbol of the trained parameters.
      wire: type in which gradients are reduced.
      ways: symbol of the shards of a parameter.

    Returns:
      The same lines, with the all-reduces also over `between`; and the all-reduce of the shards' gradients over it.
    """
    if not between:
        return lines
    every = [
        replace(line, axis=JOINED.join((*between, line.axis))) if line.kind == "all-reduce" else line for line in lines
    ]
    why = "each rank's part of the gradients, which other groups have too, once a step"
    elements = f"({of} - unsplit_{of})/{ways}"
    shards = Expectation(GRADIENTS, "all-reduce", JOINED.join(between), "1", elements, wire, pooled=True, why=why)
    return [*every, shards]


def group_symbols(plan: Plan) -> Symbols:
    """Returns the symbols of the line above; {} without groups."""
    return {WAYS: plan.zero_degree, EXPERT_WAYS: plan.expert_zero_degree} if plan.mesh.has_sharding_groups else {}
