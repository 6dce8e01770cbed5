"""Every instruction that a step executes, and how often: loops multiplied, fusions, calls and branches entered.

A branch on the stage of a pipeline counts as often as the stage that runs it takes it: embedding and losses once a
microbatch, not once a tick. Of two attention kernels, of which one runs, the first counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from mtjax.analysis.contract import SAMPLING, STAGES
from mtjax.inspect.hlo import Computation, Instruction, Module
from mtjax.inspect.phases import phase_of
from mtjax.layout.attention_kernel import EITHER, WINDOWED


@dataclass(frozen=True)
class Site:
    """An instruction at one place of the program."""

    instruction: Instruction
    computation: Computation
    count: int
    """Executions in a step."""
    is_exact: bool = True
    """False inside a loop of unknown length (counted once) or a branch (counted as if always taken).

    Branches on the stage of a pipeline are exact: some stage takes each of them. So are those of sampling: a contract
    is of steps in which all are taken."""
    callers: tuple["Site", ...] = ()
    """The instructions through which it was entered, outermost first."""


def walk(module: Module) -> Iterator[Site]:
    """All instructions, from the entry down, in order of execution."""
    yield from _visit(module, module.entry, 1, True, ())


def _visit(
    module: Module, computation: Computation, count: int, exact: bool, callers: tuple[Site, ...]
) -> Iterator[Site]:
    for instruction in computation.instructions:
        site = Site(instruction, computation, count, exact, callers)
        yield site
        inner, known = executions(instruction)
        branch = module.stage_branches.get(instruction.name)
        for callee in module.callees(instruction):
            # The table has a row for each tick of the loop around the branch, so its count is that of a step already:
            # not times `count`.
            times = branch.count(module.is_true_branch(instruction, callee)) if branch else count * inner
            # Only one of the two kernels runs, so only the first is counted. The second is for unusual lengths of
            # documents, or for layers without a window; its FLOPs are the same, as a window's are counted in full.
            if attention_choice(instruction) and not module.is_true_branch(instruction, callee):
                times = 0
            # Fusions too: matmuls may be in them.
            yield from _visit(module, callee, times, exact and known, (*callers, site))


def attention_choice(instruction: Instruction) -> str | None:
    """Returns `EITHER` or `WINDOWED` of an instruction that runs one of two attention kernels, None of others."""
    scopes = instruction.op_name.split("/") if instruction.opcode == "conditional" else ()
    # The innermost: a kernel for documents, itself one of two, may be one of two by window.
    return next((scope for scope in reversed(scopes) if scope in (EITHER, WINDOWED)), None)


def executions(instruction: Instruction) -> tuple[int, bool]:
    """How often an instruction runs what it calls, and whether that is certain."""
    if instruction.opcode == "while":
        return instruction.trip_count if instruction.trip_count is not None else 1, instruction.trip_count is not None
    # Sampling has a branch for each of its features, and the contract of decoding is that of a step with all of them.
    return 1, instruction.opcode != "conditional" or phase_of(instruction.op_name) in (SAMPLING, STAGES)
