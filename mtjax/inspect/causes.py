"""Memory-bound time of a step by cause, read off its operations.

A cause is the purpose of an operation as far as the program shows it: the phase that its scopes name, and what its
kernel does - write to a stack inside a loop, fill with zeros, cast, slice or concatenate, or compute.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from mtjax.analysis.contract import GRADIENTS, LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OPTIMIZER, PARAMETERS
from mtjax.inspect.collectives import computes
from mtjax.inspect.hlo import Computation, Instruction, Module
from mtjax.inspect.phases import locate
from mtjax.inspect.roofline import NONE_TAKEN, Roofline, Taken
from mtjax.inspect.traffic import bytes_moved

STACKS = "stacks of the loop over layers: written into, sliced out of"
ZEROS = "zeros"
SPLIT = "split and joined"
CASTS = "types changed, copies, transposes"
AGAIN = "computed again"
FORWARD, BACKWARD = "layer forward, element-wise", "layer backward, element-wise"
SUMS = "gradients and parameters: added, put together, taken apart"
UPDATE = "optimizer"
ENDS = "embedding and loss"
SMALL = "small operations, as long as a launch"
REST = "other"
"""Causes, keys of the JSON report; the first that applies is an operation's, `UPDATE` and `ENDS` before others."""
LABELS: Mapping[str, str] = {
    STACKS: "stacks of the layer loop: writes and slices",
    ZEROS: "fills with zeros",
    SPLIT: "slices and concatenations",
    CASTS: "casts, copies, transposes",
    AGAIN: "recompute",
    SUMS: "gradients and parameters: adds, slices, concatenations",
    SMALL: "small kernels (launch-bound)",
    "products": "matmuls",
    "nothing runs": "idle",
}
"""Cause -> its label in tables, where that is another."""

Causes = Mapping[str, Mapping[str, float]]
"""Seconds by phase and cause."""

_FILLS = ("constant", "broadcast", "iota", "tuple", "bitcast")
_CUTS = ("slice", "concatenate", "pad")
_MOVES = ("convert", "copy", "transpose", "reshape", "bitcast", "parameter", "tuple", "constant", "reduce-precision")


def memory_bound_by_cause(roofline: Roofline) -> dict[str, dict[str, float]]:
    """Returns the seconds of a step's memory-bound operations, by phase and cause; they add up to `Roofline.run`'s."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for computation, instruction, times, in_loop in executed(roofline, roofline.module.entry, 1, in_loop=False):
        seconds, is_matmul = roofline.seconds(computation, instruction)
        if not is_matmul:
            phase = locate(computation, instruction)[0]
            moving = roofline.machines[2].passes(bytes_moved(roofline.module, computation, instruction))
            cause = cause_of(roofline.module, instruction, phase, in_loop, is_small=moving < roofline.launch)
            found[phase][cause] += times * seconds
    return {phase: dict(causes) for phase, causes in found.items()}


def by_cause(causes: Causes) -> dict[str, dict[str, float]]:
    """Returns the seconds by cause and phase, most seconds first."""
    transposed: dict[str, dict[str, float]] = defaultdict(dict)
    for phase, each in causes.items():
        for cause, seconds in each.items():
            transposed[cause][phase] = seconds
    return dict(sorted(transposed.items(), key=lambda row: -sum(row[1].values())))


def cause_of(module: Module, instruction: Instruction, phase: str, in_loop: bool, *, is_small: bool = False) -> str:
    """Returns the cause of an operation.

    Args:
      module: the program.
      instruction: an operation that computes, no loop.
      phase: of the step.
      in_loop: whether it is in the body of a loop.
      is_small: whether it takes no longer than a launch.
    """
    # Before all kinds of kernels: here the reader wants to know what the optimizer costs, whatever it does.
    if phase == OPTIMIZER:
        return UPDATE
    if phase.startswith(("embedding", "loss")):
        return ENDS
    kinds = set(_kinds(module, instruction))
    cuts = kinds & {"dynamic-slice", "dynamic-update-slice"}
    outside = phase in (GRADIENTS, PARAMETERS)
    # A slice with a cast is a cast: with 16-bit arithmetic each layer's matrices pass through one as they come out of
    # their stack.
    writes, cuts_alone = "dynamic-update-slice" in kinds, bool(cuts) and kinds <= {*cuts, *_MOVES} - {"convert"}
    # The first that holds decides: a small kernel that writes into a stack is one of the stack's, as unrolled layers
    # would not have it.
    rules = {
        STACKS: in_loop and not outside and (writes or cuts_alone),
        ZEROS: kinds <= set(_FILLS),
        SPLIT: phase in (LAYER_FORWARD, LAYER_RECOMPUTE, LAYER_BACKWARD) and bool(kinds & set(_CUTS)),
        CASTS: kinds <= {*_MOVES, *cuts} and not outside,
        AGAIN: phase == LAYER_RECOMPUTE and not is_small,
        SUMS: outside,
        SMALL: is_small,
        FORWARD: phase == LAYER_FORWARD,
        BACKWARD: phase == LAYER_BACKWARD,
    }
    return next((cause for cause, holds in rules.items() if holds), REST)


def _kinds(module: Module, instruction: Instruction) -> Iterator[str]:
    """Yields the opcodes of an operation on arrays; index arithmetic on scalars is omitted."""
    callees = list(module.callees(instruction)) if instruction.opcode == "fusion" else []
    if not callees:
        yield instruction.opcode
    for callee in callees:
        for inner in callee.instructions:
            if inner.opcode == "fusion":
                yield from _kinds(module, inner)
            # Loop counters and indices into stacks are in nearly every kernel.
            elif inner.opcode == "parameter" or any(array.elements > 1 for array in inner.arrays):
                yield inner.opcode


def executed(
    roofline: Roofline, computation: Computation, times: float, *, in_loop: bool, taken: Taken = NONE_TAKEN
) -> Iterator[tuple[Computation, Instruction, float, bool]]:
    """Yields operations with their executions and whether they are in a loop; of branches, those that the roofline
    counts."""
    for instruction in computation.instructions:
        if instruction.opcode in ("while", "call", "conditional"):
            inside = in_loop or instruction.opcode == "while"
            for run in roofline.runs(instruction, taken):
                yield from executed(roofline, run.computation, times * run.times, in_loop=inside, taken=run.taken)
        elif computes(instruction) and instruction.name not in roofline.collectives:
            yield computation, instruction, times, in_loop
