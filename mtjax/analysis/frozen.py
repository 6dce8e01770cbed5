"""Gradients that finetuning with adapters does not compute: those of inputs below which all weights are frozen."""

from mtjax.analysis.anatomy import Stack
from mtjax.config import Model
from mtjax.config.layer_pattern import runs_of
from mtjax.config.ssm import letters_of
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk
from mtjax.layout.timetable import timetable


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
