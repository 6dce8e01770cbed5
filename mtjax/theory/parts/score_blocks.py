"""How many scores attention's kernels hold at a time, without context parallelism and with it."""

from mtjax.theory.parts.part import Scores
from mtjax.theory.plan import Plan

QUERIES_AT_A_TIME = 512
"""Queries whose scores XLA's kernel holds at a time with context parallelism."""
SCORES_AT_A_TIME, LEAST_QUERIES_AT_A_TIME = 2**25, 64
"""Scores of a rank that the kernel `blocks` holds at a time, if these are of at least so many queries per head."""


def queries_at_a_time(rows: float, keys: float) -> int:
    """Returns the queries of a sample whose scores the kernel `blocks` holds at a time: a power of two.

    Args:
      rows: samples times heads of a rank.
      keys: of a sample.
    """
    queries = QUERIES_AT_A_TIME
    while queries > LEAST_QUERIES_AT_A_TIME and queries * rows * keys > SCORES_AT_A_TIME:
        queries //= 2
    return queries


def documents_at_most(tokens: int) -> int:
    """Returns the documents of a sample for which cuDNN's kernel has statistics; samples with more are attended to in
    blocks by XLA's."""
    return max(tokens // 256, 2)


def block_queries(scores: Scores, plan: Plan) -> int:
    """Returns the queries of a sample whose scores the kernel `blocks` holds at a time on a rank."""
    return queries_at_a_time(plan.microbatch_size * scores.heads / plan.mesh.model, scores.keys)


def block_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the bytes alive in a step of the backward pass of the kernel `blocks`: float32 sums of the gradients of
    keys and values, and of a few queries what `score_bytes` says."""
    keys = max(scores.groups / plan.mesh.model, 1) * scores.width * scores.keys * plan.microbatch_size
    pairs = min(block_queries(scores, plan), scores.queries) * scores.keys * plan.microbatch_size
    return 2 * 4 * keys + score_bytes(plan) * scores.heads / plan.mesh.model * pairs


def score_bytes(plan: Plan) -> int:
    """Returns the bytes per score of XLA's kernel in blocks: scores, their exponentials and the gradients of both in
    float32 and twice in the compute dtype."""
    return 3 * 4 + 2 * plan.element_bytes
