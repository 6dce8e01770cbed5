"""Gradients that finetuning with adapters does not compute: those of inputs below which all weights are frozen."""

from mtjax.analysis.anatomy import Stack
from mtjax.config.layer_pattern import loops_of_pattern
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk, order_in_plan
from mtjax.layout.timetable import timetable


def unread_gradients(stack: Stack, plan: Plan, chunks: int) -> int:
    """Returns how often the compiler drops the gradient of the first layer's input, if nothing below it is trained.

    It can if the layer is not in a loop with others; in a pipeline, whose backward halves send this gradient on, only
    in the last tick, if that is not in a loop with others either.
    """
    layers = layers_in_chunk(stack, plan)
    if slots := order_in_plan(stack, plan).pattern:
        if 0 not in stack.layer_numbers:
            return 0
        layers = loops_of_pattern(slots)[0].times
    if layers > 1 and not plan.unrolled:
        return 0
    if not plan.is_staged:
        return plan.microbatches
    last = timetable(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, chunks).phases[-1]
    return int(last.stop - last.start == 1)
