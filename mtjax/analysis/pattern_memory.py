"""Memory of layers that follow a pattern, in addition to that of a layer at work, and of shared blocks."""

from dataclasses import replace
from itertools import pairwise

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.counts import Counts, layer_counts
from mtjax.analysis.float8 import layer_bytes
from mtjax.analysis.model_states import States, model_states
from mtjax.analysis.parts.attention import ATTENTION_OUTPUT, QUERY_KEY_VALUE
from mtjax.analysis.parts.part import Part
from mtjax.analysis.parts.sublayer import stream_bytes
from mtjax.analysis.pattern_time import is_mixed
from mtjax.analysis.stage_symbols import block_counts
from mtjax.config.layer_pattern import joined_loops
from mtjax.layout.plan import Plan


def waiting_bytes(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the bytes that weight gradients of other kinds of layers still read while a layer of `stack` is at
    work."""
    # XLA: delays weight gradients, up to the end of an iteration of the loop, to overlap them with collectives. With
    # prefetch, they are computed before the layer below begins.
    ends_layers = plan.residuals == "megatron" or plan.prefetches(anatomy.model)
    if not anatomy.model.layer_pattern or plan.mesh.model == 1 or ends_layers:
        return 0.0
    others = (other for other in anatomy.stacks if other is not stack)
    return sum(max(_pending(part, stack.hidden, plan) for part in other.parts) for other in others)


def late_probabilities(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the bytes of recomputed probabilities, in the compute dtype, that the gradient of values reads after the
    scores' gradient has been computed."""
    # XLA: in patterns with prefetch, without tensor parallel collectives; read off a program with full recompute.
    is_late = plan.zero == 3 and plan.mesh.model == 1 and plan.recompute == "full" and is_mixed(anatomy, plan)
    if not is_late or not plan.keeps_scores:
        return 0.0
    return plan.element_bytes * plan.microbatch_size * sum(part.scores.pairs for part in stack.parts if part.scores)


def _pending(part: Part, hidden: int, plan: Plan) -> float:
    """Returns what the weight gradients of a component read; attention's, in a separate layer, wait, too."""
    if part.scores is None:
        return part.pending_bytes(plan)
    saved = part.saved_bytes(plan)
    gathered = 2 * stream_bytes(part.scores.queries, hidden, plan) if plan.splits_stream else 0.0
    return saved[QUERY_KEY_VALUE] + saved[ATTENTION_OUTPUT] + gathered


def prefetched_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of the parameters that ZeRO-3 holds in full while the loss is computed: of the last two layers,
    or in a pattern of the last, if it is not gathered again."""
    if plan.zero < 3 or not plan.prefetches(anatomy.model):
        return 0.0
    last, pattern = anatomy.stacks[-1], anatomy.stacks[-1].pattern
    if all(stack.has_own_loop for stack in anatomy.stacks):
        return 2 * layer_bytes(last, anatomy.model, plan)
    last = next(stack for stack in anatomy.stacks if stack.letter == pattern[-1])
    return layer_bytes(last, anatomy.model, plan) if joined_loops(pattern)[0].times > 1 else 0.0


def gathered_bytes(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the bytes of two layers' gathered parameters with ZeRO-3, the current and the prefetched one's, and of
    the previous layer's gradients, whose reduction is overlapped; in a pattern, that layer may be of any kind."""
    model, of_layer = anatomy.model, layer_bytes(stack, anatomy.model, plan)
    has_others = bool(model.layer_pattern) and len(anatomy.stacks) > 1
    in_flight = plan.precision.gradients if plan.overlaps_data(model) or has_others else 0
    before = anatomy.stacks if has_others else (stack,)
    gradients = in_flight * max(layer_counts(one, plan.layout(model), plan.mesh).all for one in before)
    # Gradients that are sent in 16 bits are not converted: their memory is free before the layer's own are computed.
    is_free = plan.precision.reduced < plan.precision.gradients
    if not is_free or not is_mixed(anatomy, plan):
        return 2 * of_layer + gradients
    below = {low for low, letter in pairwise(stack.pattern) if letter == stack.letter}
    return of_layer + max((layer_bytes(one, model, plan) for one in anatomy.stacks if one.letter in below), default=0.0)


def shared_states(anatomy: Anatomy, plan: Plan, held: Counts, trainable: Counts) -> list[States]:
    """Returns the model states of parameters that are not experts', on a device; ZeRO-2 and 3 treat shared blocks on
    pipeline stages as ZeRO-1 does."""
    blocks, trained = block_counts(anatomy, plan), block_counts(anatomy, plan, trained=True)
    others = Counts(held.all - blocks.all, held.replicated - blocks.replicated)
    of_others = Counts(trainable.all - trained.all, trainable.replicated - trained.replicated)
    as_first = replace(plan, zero=1) if blocks.all else plan
    degree = plan.zero_degree
    return [model_states(plan, others, of_others, degree), model_states(as_first, blocks, trained, degree)]


def block_copies(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of the shared blocks that ZeRO-3 gathers once a step; those of ZeRO-2 count with all else."""
    blocks = block_counts(anatomy, plan) if plan.zero == 3 else Counts()
    return plan.precision.matrices * blocks.outside_matrices + plan.precision.weights * blocks.outside_vectors


def block_gradients(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of a second gradient of shared blocks on pipeline stages with ZeRO-2 and 3: a stage's, and the
    sum over stages."""
    return plan.precision.gradients * block_counts(anatomy, plan, trained=True).all
