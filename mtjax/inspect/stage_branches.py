"""Which branches of a pipeline's tick loops each stage takes in each tick, from the timetable that the program runs.

The program decides on a branch by the stage and by a row of the timetable, which XLA's text leaves out. So a branch is
recognized by the phases of what it runs (`mtjax.sharding.pipeline.executor`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mtjax.analysis.contract import (
    EMBEDDING_BACKWARD,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_PHASES,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    STAGES,
)
from mtjax.inspect.hlo import Computation, Instruction, Module, StageBranch
from mtjax.inspect.phases import phase_of
from mtjax.layout.timetable import Phase, Timetable, Work

EMBEDDING = "embedding"
"""Taken by the first stage in halves of a section's first chunk; idle halves count as the first section's."""
EMBEDDING_GRADIENTS = "embedding, backward"
"""The same in halves with work."""
LOSSES = "losses"
"""Taken by the last stage in halves of the last chunk with work."""
NO_LAYERS = "no layers"
"""Taken by the last stage in forward halves of the last chunk, whose layers the backward half computes again."""
OTHER_SECTION = "another section"
"""Taken in halves of another section's chunks."""


class _Branch(NamedTuple):
    """A conditional whose condition depends on the stage."""

    instruction: Instruction
    kind: str
    is_backward: bool
    section: int


def with_stage_branches(module: Module, table: Timetable, sections: int) -> Module:
    """Returns the module with the stages and ticks that take each branch on the stage.

    A loop over ticks is recognized by its length. A branch in a loop of another length counts as taken in all of it.

    Args:
      module: an optimized train step.
      table: the timetable that it runs.
      sections: of the model.
    """
    found: dict[str, StageBranch] = {}
    # The program runs the phases of the timetable in order, so a loop that is recognized also dates the branches before
    # it.
    phases, alone = table.phases, list[Instruction]()
    for instruction in module.entry.instructions:
        if _is_on_stage(instruction):
            alone.append(instruction)
        elif instruction.opcode == "while":
            on_stage = [i for body in module.callees(instruction) for i in body.instructions if _is_on_stage(i)]
            lengths = [phase.stop - phase.start for phase in phases]
            if on_stage and instruction.trip_count in lengths:
                # The next phase of this length: those that were found are dropped from the list.
                number = lengths.index(instruction.trip_count)
                found |= _of_single_ticks(module, alone, phases[:number], table, sections)
                found |= _of_phase(_classified(module, on_stage, sections), phases[number], table, sections)
                phases, alone = phases[number + 1 :], []
    return replace(module, stage_branches=found | _of_single_ticks(module, alone, phases, table, sections))


def _is_on_stage(instruction: Instruction) -> bool:
    """Returns whether the timetable decides on a conditional. Those around a layer do not depend on the tick: a stage
    skips layers that only others have (`mtjax.models.padding_layers`). They count as never skipped."""
    if instruction.opcode != "conditional" or phase_of(instruction.op_name) != STAGES:
        return False
    # What is around the branch: in a layer's phase it is the layer that is skipped.
    around, _, _ = instruction.op_name.rpartition("stages")
    return phase_of(around) not in LAYER_PHASES


def _of_single_ticks(
    module: Module, instructions: Sequence[Instruction], phases: Sequence[Phase], table: Timetable, sections: int
) -> dict[str, StageBranch]:
    """Branches that are in no loop: XLA unrolls a phase of one tick, and several such phases follow each other."""
    found: dict[str, StageBranch] = {}
    left = [phase for phase in phases if phase.stop - phase.start == 1]
    seen: set[tuple[str, bool, int]] = set()
    for branch in _classified(module, instructions, sections):
        key, phase = branch[1:], left[0] if left else None
        # A tick runs its forward half first: a forward branch after a backward one is in the next tick.
        is_forward_again = not branch.is_backward and any(is_backward for _, is_backward, _ in seen)
        has_half = phase is not None and (phase.backward if branch.is_backward else phase.forward)
        if phase is not None and (key in seen or is_forward_again or not has_half):
            left, seen = left[1:], set()
        if left:
            found |= _of_phase([branch], left[0], table, sections)
        seen.add(key)
    return found


def _classified(module: Module, instructions: Sequence[Instruction], sections: int) -> Iterator[_Branch]:
    """Yields branches of a tick, and those in them, with their kinds; sections follow each other in either half."""
    counts = {False: 0, True: 0}
    for instruction in instructions:
        phases = _phases_in(module, instruction)
        # The last stage computes the losses in its backward halves.
        is_backward = bool(phases & {LAYER_BACKWARD, LOSS_FORWARD, LOSS_BACKWARD, EMBEDDING_BACKWARD})
        if sections == 1:
            yield _Branch(instruction, _kind(phases), is_backward, 0)
            continue
        # Names do not tell encoder from decoder; the order in which the executor writes their halves does.
        section = counts[is_backward] % sections
        counts[is_backward] += 1
        yield _Branch(instruction, OTHER_SECTION, is_backward, section)
        for body in module.callees(instruction):
            for inner in filter(_is_on_stage, body.instructions):
                yield _Branch(inner, _kind(_phases_in(module, inner)), is_backward, section)


def _kind(phases: set[str]) -> str:
    if EMBEDDING_BACKWARD in phases:
        return EMBEDDING_GRADIENTS
    if phases & {LOSS_FORWARD, LOSS_BACKWARD}:
        return LOSSES
    return NO_LAYERS if LAYER_FORWARD in phases else EMBEDDING


def _phases_in(module: Module, instruction: Instruction) -> set[str]:
    """Returns the phases that operations name in what an instruction calls."""

    def named(computation: Computation) -> Iterator[str]:
        for inner in computation.instructions:
            if phase := phase_of(inner.op_name):
                yield phase
            for callee in module.callees(inner) if inner.opcode in ("while", "call", "conditional") else ():
                yield from named(callee)

    return {phase for body in module.callees(instruction) for phase in named(body)}


def _of_phase(
    branches: Sequence[_Branch] | Iterator[_Branch], phase: Phase, table: Timetable, sections: int
) -> dict[str, StageBranch]:
    """Returns the ticks of a phase in which stages take branches."""
    found = {}
    for branch in branches:
        halves = (table.backward if branch.is_backward else table.forward)[phase.start : phase.stop]
        # Losses are counted on the last stage and everything else on the first: contract and counts are of the stage
        # that has the work.
        rows = (
            tuple(_is_taken(branch, stage, work, table, sections) for stage, work in enumerate(half)) for half in halves
        )
        found[branch.instruction.name] = StageBranch(tuple(rows), table.stages - 1 if branch.kind == LOSSES else 0)
    return found


def _is_taken(branch: _Branch, stage: int, work: Work | None, table: Timetable, sections: int) -> bool | None:
    # Idle halves compute as if they had the first chunk, and their results are discarded
    # (`mtjax.sharding.pipeline.executor`).
    chunk, each = work.chunk if work else 0, table.chunks // sections
    is_other = chunk // each != branch.section
    if branch.kind == OTHER_SECTION or is_other:
        return is_other if branch.kind == OTHER_SECTION else None
    is_first = stage == 0 and chunk == branch.section * each
    is_last = stage == table.stages - 1 and chunk == table.chunks - 1
    return {
        EMBEDDING: is_first,
        EMBEDDING_GRADIENTS: is_first and work is not None,
        LOSSES: is_last and work is not None,
        NO_LAYERS: is_last,
    }[branch.kind]
