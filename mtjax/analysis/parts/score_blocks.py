"""How many scores attention's kernels hold at a time, without context parallelism and with it."""

from mtjax.analysis.parts.part import Scores
from mtjax.layout.attention_kernel import queries_at_a_time, spans_of
from mtjax.layout.plan import Plan


def block_queries(scores: Scores, plan: Plan) -> int:
    """Returns the queries of a sample whose scores the kernel `blocks` holds at a time on a rank."""
    return queries_at_a_time(plan.microbatch_size * scores.heads / plan.mesh.model, scores.keys)


def computed_share(scores: Scores, plan: Plan) -> float:
    """Returns the share of all pairs of queries and keys for which the kernel `blocks` computes scores."""
    if not plan.attention_in_blocks or plan.context_parallelism or not scores.is_causal:
        return 1.0
    spans = spans_of(scores.queries, block_queries(scores, plan))
    # The n-th of s spans reads the keys of n spans: s (s + 1) / 2 of s^2 in all.
    return (spans + 1) / (2 * spans)


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
