"""Memory of layers that follow a pattern, in addition to that of a layer at work."""

from mtjax.analysis.anatomy import Anatomy, Stack
from mtjax.analysis.parts.attention import ATTENTION_OUTPUT, QUERY_KEY_VALUE
from mtjax.analysis.parts.part import Part
from mtjax.analysis.parts.sublayer import stream_bytes
from mtjax.layout.plan import Plan


def waiting_bytes(anatomy: Anatomy, stack: Stack, plan: Plan) -> float:
    """Returns the bytes that weight gradients of other kinds of layers still read while a layer of `stack` is at
    work."""
    # XLA: delays weight gradients, up to the end of an iteration of the loop, to overlap them with collectives.
    if not anatomy.model.layer_pattern or plan.mesh.model == 1 or plan.residuals == "megatron":
        return 0.0
    others = (other for other in anatomy.stacks if other is not stack)
    return sum(max(_pending(part, stack.hidden, plan) for part in other.parts) for other in others)


def _pending(part: Part, hidden: int, plan: Plan) -> float:
    """Returns what the weight gradients of a component read; attention's, in a separate layer, wait, too."""
    if part.scores is None:
        return part.pending_bytes(plan)
    saved = part.saved_bytes(plan)
    gathered = 2 * stream_bytes(part.scores.queries, hidden, plan) if plan.splits_stream else 0.0
    return saved[QUERY_KEY_VALUE] + saved[ATTENTION_OUTPUT] + gathered
