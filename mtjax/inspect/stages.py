"""Pipeline stages of a compiled program: timetable, stage-boundary permutes and memory."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mtjax.analysis.contract import LAYER_PHASES
from mtjax.analysis.memory import Memory, stage_memory
from mtjax.analysis.schedules import megatron_bubble
from mtjax.errors import UserError
from mtjax.inspect.collectives import collective_kind, computes, is_started, overlap_window, starter
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.groups import Groups, axes_of, parse_groups
from mtjax.inspect.hlo import Array, Computation, Instruction, Module
from mtjax.inspect.hlo_walk import Site, walk
from mtjax.inspect.phases import locate
from mtjax.inspect.products import product_of
from mtjax.layout.stages import stack_order
from mtjax.layout.timetable import Timetable
from mtjax.sharding.pipeline.executor import PipelineSchedule

ONWARD, BACK, EITHER_WAY = "activations", "gradients", "either way"
"""Contents of permutes: activations to the next stage, gradients to the previous one; of two stages in a ring the
direction does not distinguish them."""


@dataclass(frozen=True)
class Permutes:
    """Collective-permutes between stages with the same contents."""

    carries: str
    arrays: tuple[Array, ...]
    """Of one permute."""
    count: int
    """Executions in a step."""
    payload_bytes: int
    """Of one execution."""
    hidden: int
    """Overlapped executions in a step: with a layer's matmul between start and done."""
    behind: Mapping[str, int]
    """Phase of these matmuls -> overlapped executions."""


@dataclass(frozen=True)
class Stage:
    """Layers and memory of a stage."""

    layers: int
    in_flight: int
    """Most chunks of microbatches in flight: used slots, of those that all stages have."""
    memory: Memory
    """By formula."""


@dataclass(frozen=True)
class StagesReport:
    """The pipeline of a compiled program."""

    schedule: str
    table: Timetable
    """The timetable that the program runs."""
    permutes: tuple[Permutes, ...]
    stages: tuple[Stage, ...]

    @property
    def bubble_formula(self) -> float:
        """Megatron's bubble, by formula."""
        return megatron_bubble("interleaved", self.table.stages, self.table.microbatches, self.table.chunks)


def stages_report(step: CompiledStep) -> StagesReport | None:
    """Returns the pipeline of a compiled step; None without one."""
    schedule = step.program.microbatch_schedule(step.plan.microbatches)
    if not isinstance(schedule, PipelineSchedule):
        return None
    table, parallel = schedule.training, step.config.parallel
    orders = [
        stack_order(stack, table.stages, parallel.chunks, parallel.layers_per_stage) for stack in step.anatomy.stacks
    ]
    stages = tuple(
        Stage(sum(order.layers_on(i) for order in orders), table.in_flight(i), stage_memory(step.anatomy, step.plan, i))
        for i in range(table.stages)
    )
    axis = step.program.layout.rules.mesh_axes("layers")
    return StagesReport(
        parallel.pipeline_schedule, table, tuple(find_permutes(step.module, step.mesh_axes, axis)), stages
    )


def find_permutes(module: Module, mesh: Mapping[str, int], along: tuple[str, ...]) -> Iterator[Permutes]:
    """Yields the permutes between stages, by contents and arrays, in the order of their first execution.

    Args:
      module: an optimized program.
      mesh: mesh axis -> degree, outermost first.
      along: the mesh axis of the stages.
    """
    groups: dict[tuple[str, tuple[Array, ...]], list[Site]] = {}
    for site in walk(module):
        if collective_kind(site.instruction) != "collective-permute":
            continue
        if carries := _carried(site, module.num_partitions, mesh, along):
            arrays = site.computation.operand_arrays(site.instruction)
            groups.setdefault((carries, arrays), []).append(site)
    for (carries, arrays), sites in groups.items():
        hidden, behind = 0, Counter[str]()
        for site in sites:
            phases = _hiding_phases(module, site)
            hidden += site.count if phases else 0
            # One permute may overlap with matmuls of several phases, so these counts add up to more than `hidden`.
            behind.update(dict.fromkeys(phases, site.count))
        yield Permutes(
            carries, arrays, sum(site.count for site in sites), sum(a.bytes for a in arrays), hidden, dict(behind)
        )


def _carried(site: Site, devices: int, mesh: Mapping[str, int], along: tuple[str, ...]) -> str | None:
    """Returns the contents of a permute; None where it is not between stages."""
    try:
        groups = parse_groups(site.instruction.attributes, devices)
    except UserError:
        return None
    if groups is None or axes_of(groups, mesh) != along:
        return None
    return direction(groups, mesh, along[0])


def direction(groups: Groups, mesh: Mapping[str, int], axis: str) -> str:
    """Returns the direction in which a permute sends along a mesh axis.

    Args:
      groups: the source-target pairs, as positions in the mesh.
      mesh: mesh axis -> degree, outermost first.
      axis: of the stages.
    """
    dimension = list(mesh).index(axis)
    pairs = np.array(groups.members)
    stage = np.stack([np.unravel_index(ids, tuple(mesh.values()))[dimension] for ids in pairs.T])
    steps = {int(step) for step in stage[1] - stage[0]}  # in a ring, also 1 - degree
    return {(True, False): ONWARD, (False, True): BACK}.get((1 in steps, -1 in steps), EITHER_WAY)


def _hiding_phases(module: Module, site: Site) -> list[str]:
    """Returns the phases of layers whose matmuls overlap with a permute."""
    holder = starter(site)
    if not is_started(holder.instruction):
        return []
    window = overlap_window(holder.computation, holder.instruction)
    phases = {phase for i in window if computes(i) for phase in _product_phases(module, holder.computation, i)}
    # What matters is a layer's matmul: beside element-wise work alone a permute would not be hidden.
    return [phase for phase in LAYER_PHASES if phase in phases]


def _product_phases(module: Module, computation: Computation, instruction: Instruction) -> Iterator[str]:
    """Yields the phase of each matmul in an instruction, also in loops and branches that it runs."""
    if product_of(computation, instruction) is not None:
        yield locate(computation, instruction)[0]
    for callee in module.callees(instruction):
        for inner in callee.instructions:
            yield from _product_phases(module, callee, inner)
