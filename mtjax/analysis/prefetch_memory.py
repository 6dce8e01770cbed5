"""Memory of layers of several kinds that prefetch for each other beside tensor parallelism."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.counts import layer_counts
from mtjax.analysis.float8 import layer_bytes
from mtjax.analysis.parts.attention import (
    ATTENTION_OUTPUT,
    PROBABILITIES,
    QUERY_KEY_VALUE,
    STATISTICS,
    gradient_bytes,
    probability_bytes,
)
from mtjax.analysis.parts.delta_net import DELTA_INPUTS, DELTA_OUTPUT
from mtjax.analysis.parts.mamba import STATE_SPACE_INPUTS, STATE_SPACE_OUTPUT
from mtjax.analysis.parts.part import Part
from mtjax.analysis.parts.sublayer import NORM_INPUTS, stream_bytes
from mtjax.analysis.pattern_time import is_mixed
from mtjax.config.layer_pattern import joined_loops
from mtjax.layout.plan import Plan

Kinds = Mapping[str, float]


COPIED = (
    QUERY_KEY_VALUE,
    ATTENTION_OUTPUT,
    PROBABILITIES,
    NORM_INPUTS,
    STATE_SPACE_INPUTS,
    STATE_SPACE_OUTPUT,
    DELTA_INPUTS,
    DELTA_OUTPUT,
)
"""What a loop over layers copies out of its stacks."""


def backward_peak(part: Part, plan: Plan) -> float:
    """Returns the bytes at the peak of a component's backward pass."""
    return part.backward_peak_bytes(plan)


def parts_peak(stack: StackParts, plan: Plan, peak_of: Callable[[Part, Plan], float] = backward_peak) -> float:
    """Returns the bytes at the peak of a layer's components, with what waits for those before, or of those after."""
    pairs = sum(part.scores.pairs for part in stack.parts if part.scores) if plan.keeps_scores else 0
    scores = plan.element_bytes * pairs * plan.microbatch_size / plan.mesh.model
    peaks, pending, before = [], 0.0, sum(part.waiting_bytes(plan) for part in stack.parts)
    for part in reversed(stack.parts):
        # What waits for the backward passes of the components before; that of this one has begun.
        before -= part.waiting_bytes(plan)
        # During the MLP's backward pass dropped-out probabilities are alive in the compute dtype, during attention's
        # what the MLP's weight gradients still read.
        peaks.append(peak_of(part, plan) + before + (pending if part.scores else scores))
        pending = max(pending, part.pending_bytes(plan))
    return max(peaks)


def sends_before_gathers(anatomy: Anatomy, plan: Plan) -> bool:
    """Returns whether layers of several kinds send the gradients of the layer above before they gather the layer below
    with ZeRO-3."""
    return plan.zero == 3 and plan.mesh.model > 1 and is_mixed(anatomy, plan)


def peak_in_pattern(anatomy: Anatomy, plan: Plan, needed: Mapping[str, Kinds], saved: Mapping[str, Kinds]) -> float:
    """Returns the bytes of a layer's backward pass at the peak, less the saved activations of later layers, which are
    free by then: those of later loops, and, outside loops of several iterations, of all later layers.

    Args:
      anatomy: of the model.
      plan: of its run.
      needed: letter -> what a layer saves without recompute, by kind.
      saved: letter -> what all layers save.
    """
    free, peak, pattern = 0.0, 0.0, anatomy.stacks[0].pattern
    stacks = {stack.letter: stack for stack in anatomy.stacks}
    of_layer = {letter: sum(kinds.values()) / pattern.count(letter) for letter, kinds in saved.items()}
    for unit, times in reversed(joined_loops(pattern)):
        for letter in reversed(unit):
            in_place = saved[letter] if times == 1 else {}
            peak = max(peak, _layer_peak(anatomy, stacks[letter], plan, needed[letter], in_place) - free)
            free += of_layer[letter] if times == 1 else 0.0
        free += times * sum(of_layer[letter] for letter in unit) if times > 1 else 0.0
    return peak


def _layer_peak(anatomy: Anatomy, stack: StackParts, plan: Plan, kinds: Kinds, in_place: Kinds) -> float:
    """Returns the bytes of a layer's backward pass, in a loop, or outside, where it reads `in_place` what was saved."""
    stream = kinds[NORM_INPUTS] / len(stack.sublayers)
    read = (*in_place, NORM_INPUTS) if in_place else ()
    names = (*COPIED, STATISTICS) if plan.packs_documents else COPIED
    copied = sum(kinds.get(name, 0.0) for name in names if name not in read)
    # A norm's output is read in full where the stream is split, and gathered then: it counts with the component.
    outputs = kinds[NORM_INPUTS] if plan.recompute == "full" and not plan.splits_stream else 0.0
    # The gradient of the residual stream, after the layer and before it. Outside the loops, the gradients of the norm
    # after the layers still wait, which read a float32 array.
    streams = (2 + (4 / plan.element_bytes if in_place else 0) + int(plan.dropout) / plan.element_bytes) * stream
    parameters = _parameters_and_gradients(anatomy, stack, plan)
    return parameters + copied + outputs + streams + parts_peak(stack, plan, partial(_peak, stack))


def _peak(stack: StackParts, part: Part, plan: Plan) -> float:
    """Returns the peak bytes of a component's backward pass. That of attention, in a separate layer, is its scores', or
    that of its input gradient, which comes after: with the gathered input, and the output's gathered gradient, which
    the gradient of the output projection reads. Queries, keys and values have given way to their gradients by then."""
    if part.scores is None or len(stack.parts) > 1 or not plan.splits_stream or plan.context_parallelism:
        return part.backward_peak_bytes(plan)
    gathered = stream_bytes(part.scores.queries, stack.hidden, plan)
    at_scores = part.backward_peak_bytes(plan)
    if plan.keeps_scores:
        # Without full recompute, only the gradients of weights read the gathered input: it comes after the scores.
        at_scores = gradient_bytes(part.scores, plan) + (gathered if plan.recompute == "full" else 0.0)
    return max(at_scores, 3 * gathered - probability_bytes(part.scores, plan))


def _parameters_and_gradients(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the bytes of a layer's gathered parameters, and of the layer below's, or, before that is gathered, of the
    gradients of the layer above, in the type in which they are sent."""
    model, pairs = anatomy.model, list(pairwise(stack.pattern))
    above = {high for low, high in pairs if low == stack.letter}
    below = {low for low, high in pairs if high == stack.letter}
    layout = plan.layout(model)
    found = [layer_bytes(one, model, plan) for one in anatomy.stacks if one.letter in below]
    found += [
        plan.precision.reduced * layer_counts(one, layout, plan.mesh).all
        for one in anatomy.stacks
        if one.letter in above
    ]
    return layer_bytes(stack, model, plan) + max(found, default=0.0)
