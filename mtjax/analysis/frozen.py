"""Gradients that finetuning with adapters does not compute: those of inputs below which all weights are frozen."""

from mtjax.analysis.anatomy import Anatomy, Stack
from mtjax.analysis.parts.part import Part
from mtjax.config import Model
from mtjax.config.adapters import is_trainable
from mtjax.config.layer_pattern import runs_of
from mtjax.config.ssm import letters_of
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk
from mtjax.layout.timetable import timetable


def learns_before(anatomy: Anatomy, stack: Stack, part: Part) -> bool:
    """Returns whether a weight before a component, in its layer or below the layers, is trained."""
    before = stack.parts[: stack.parts.index(part)]
    trained = any(is_trainable(anatomy.model, w.name) for p in before for w in p.weights)
    return trained or learns_below(anatomy) or is_above_others(anatomy, stack)


def learns_below(anatomy: Anatomy) -> bool:
    """Returns whether anything below the layers is trained."""
    return any(is_trainable(anatomy.model, weight.name) for part in anatomy.embed for weight in part.weights)


def is_above_others(anatomy: Anatomy, stack: Stack) -> bool:
    """Returns whether layers of another stack, which have trained parameters, are below all of this one."""
    return stack is not anatomy.stacks[0] and stack.among is not None and 0 not in stack.numbers


def unread_gradients(model: Model, stack: Stack, plan: Plan, chunks: int) -> int:
    """Returns how often the compiler drops the gradient of the first layer's input, if nothing below it is trained.

    It can if the layer is not in a loop with others; in a pipeline, whose backward halves send this gradient on, only
    in the last tick, if that is not in a loop with others either.
    """
    layers = layers_in_chunk(stack, plan)
    if letters := letters_of(model):
        if 0 not in stack.layer_numbers:
            return 0
        layers = runs_of(letters)[0].times
    if layers > 1 and not plan.unrolled:
        return 0
    if not plan.is_staged:
        return plan.microbatches
    last = timetable(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, chunks).phases[-1]
    return int(last.stop - last.start == 1)
