"""Gradients that finetuning with adapters does not compute: those of inputs below which all weights are frozen."""

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.config.layer_pattern import LayerRun, loops_of_pattern
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk, order_in_plan
from mtjax.layout.timetable import timetable


def unread_gradients(anatomy: Anatomy, stack: StackParts, plan: Plan, chunks: int) -> int:
    """Returns how often the compiler drops the gradient of the first layer's input, if nothing below it is trained: of
    the first layer with adapters, where layers before it have none.

    It can if the layer is not in a loop with others; in a pipeline, whose backward halves send this gradient on, only
    in the last tick, if that is not in a loop with others either.
    """
    first, layers = anatomy.first_learning, layers_in_chunk(stack, plan)
    if anatomy.learns_below or first not in stack.layer_numbers:
        return 0
    if slots := order_in_plan(stack, plan).pattern:
        layers = _run_of(0 if plan.is_staged else first, slots).times
    if layers > 1 and not plan.unrolled:
        return 0
    if not plan.is_staged:
        return plan.microbatches
    # In all other ticks the gradient is sent on, whether anyone reads it or not.
    last = timetable(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, chunks).phases[-1]
    return int(last.stop - last.start == 1)


def _run_of(number: int, pattern: str) -> LayerRun:
    """Returns the loop that runs the layer of this number."""
    end = 0
    for run in loops_of_pattern(pattern):
        end += len(run.unit) * run.times
        if number < end:
            return run
    raise AssertionError(f"{pattern} has no layer {number}")
