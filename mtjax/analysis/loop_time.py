"""Time of the loops within a layer (`mtjax.analysis.parts.loop`)."""

from mtjax.analysis.anatomy import Stack
from mtjax.analysis.machine import Machine
from mtjax.layout.plan import Plan


def loop_seconds(stack: Stack, plan: Plan, machine: Machine) -> tuple[float, float]:
    """Returns the seconds of the loops of one layer, forward, and backward with the recompute."""
    forward = backward = 0.0
    for loop in (part.loop(plan) for part in stack.parts):
        if loop is None:
            continue
        once, back = (
            loop.steps * (sum(machine.product(*sizes) for sizes in products) + kernels * machine.constants.launch)
            for products, kernels in zip((loop.forward, loop.backward), loop.kernels, strict=True)
        )
        forward, backward = forward + once, backward + once + back
    return forward, backward
