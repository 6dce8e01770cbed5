"""Time of the loops and scans within a layer (`mtjax.analysis.parts.loop`, `scan_kernels`)."""

from mtjax.analysis.anatomy import StackParts
from mtjax.analysis.machine import Machine
from mtjax.layout.plan import Plan


def loop_seconds(stack: StackParts, plan: Plan, machine: Machine) -> tuple[float, float]:
    """Returns the seconds of the loops of one layer, forward, and backward with the recompute."""
    forward = backward = 0.0
    for loop in (loop for part in stack.parts for loop in part.step_loops(plan)):
        others, others_back = (sum(map(machine.kernel, kernels)) for kernels in loop.kernels)
        once = loop.steps * (sum(machine.product(*sizes) for sizes in loop.forward) + others)
        # The backward pass of these loops multiplies in float32.
        wide = sum(machine.product(*sizes, is_float32=True) for sizes in loop.gradients)
        back = loop.steps * (sum(machine.product(*sizes) for sizes in loop.again) + wide + others_back)
        forward, backward = forward + once, backward + once + back
    return forward, backward


def scan_seconds(stack: StackParts, plan: Plan, machine: Machine) -> tuple[float, float]:
    """Returns the seconds of the kernels of scans that are known one by one, forward, and backward with what it
    computes again."""
    known = [kernels for part in stack.parts if (kernels := part.scan_kernels(plan)) is not None]
    forward, backward = (
        sum(kernel.times * machine.kernel(kernel.size) for kernels in known for kernel in kernels.both[way])
        + sum(each.times * machine.overhead(*each[:3]) for kernels in known for each in kernels.short[way])
        for way in (0, 1)
    )
    return forward, backward
