"""How long a step takes: a walk over a layer's kernels, collectives on the links they cross, and the bubble.

On stages it is the number of ticks of the timetable times what a tick takes; of Megatron's runs, the published bubble.

Each kernel takes the longer of its FLOPs at the sustained rate and its bytes at the memory's; each collective follows
the alpha-beta model of a ring. Times of kernels and collectives are a `Machine`'s.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.contract import GRADIENTS, LOSS_FORWARD
from mtjax.analysis.copies import FLOAT32, SUMS, Copy, copies, copies_in_step, copies_in_turn
from mtjax.analysis.counts import on_device, peak_stage_counts, zero_degree
from mtjax.analysis.expert_blocks import block_copies
from mtjax.analysis.hardware import Server
from mtjax.analysis.layer_time import head_seconds, layer_forward_seconds, layer_seconds
from mtjax.analysis.link_time import (
    axis_of,
    exposed_ahead,
    exposed_by_axis,
    exposed_sends,
    exposed_turns,
    hidden_in_ticks,
    hidden_sums,
    members_inside,
    ring_seconds,
    spent_on_stages,
    transfer_time,
)
from mtjax.analysis.machine import Constants, Machine
from mtjax.analysis.optimizer import exchanges, exposed_host_bytes, state_bytes
from mtjax.analysis.pattern_time import is_mixed
from mtjax.analysis.schedules import megatron_bubble
from mtjax.analysis.software import MTJAX, Software
from mtjax.analysis.teacher_cost import teacher_of
from mtjax.analysis.traffic import teacher_transfers, transfers
from mtjax.config.adapters import is_trainable, trains_all
from mtjax.config.sizes import output_is_tied
from mtjax.layout.mesh import MeshShape
from mtjax.layout.optimizer_states import ITERATIONS
from mtjax.layout.plan import Plan
from mtjax.layout.rules import CONTEXT, DATA, EXPERT, MODEL, STAGE
from mtjax.layout.stages import layers_in_chunk, layers_of_chunks
from mtjax.layout.timetable import num_ticks


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest GPU, by cause; communication counts only where nothing hides it."""

    products: float
    attention: float
    element_wise: float
    logits: float
    model_axis: float
    stage_axis: float
    bubble: float
    data_axis: float
    """Gradients and parameters, also where they cross `context` with it."""
    optimizer: float
    copies: float = 0.0
    """What loops over layers copy: `mtjax.analysis.copies`."""
    contention: float = 0.0
    """What computing takes longer because collectives run beside it."""
    context_axis: float = 0.0
    """Keys and values of other ranks, and their gradients."""
    expert_axis: float = 0.0
    """Tokens for the experts of other ranks, and what these say."""
    teacher: float = 0.0
    """The forward pass of a teacher before the step, with what it sends, which nothing hides."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication that computation hides, by mesh axis."""

    @property
    def compute(self) -> float:
        """All but copies, communication, bubble and optimizer."""
        return self.products + self.attention + self.element_wise + self.logits

    @property
    def total(self) -> float:
        """The step."""
        sent = self.model_axis + self.stage_axis + self.context_axis + self.expert_axis + self.data_axis
        sent += self.contention
        return self.compute + self.copies + sent + self.bubble + self.optimizer + self.teacher


_machine = cache(Machine)

ROUNDING = 1e-9
"""Share by which sums of the same numbers in another order may differ at most."""


def step_time(
    anatomy: Anatomy, plan: Plan, server: Server, software: Software = MTJAX, constants: Constants | None = None
) -> StepTime:
    """Returns the seconds of one optimizer step, by cause."""
    machine = _machine(server, plan.element_bytes, constants)
    if plan.is_staged:
        return _lock_step_time(anatomy, plan, machine, software)
    plan = _as_run_by(software, plan)
    m = plan.microbatches
    products, attention, element_wise = (m * x for x in _layers(anatomy, plan, machine, software))
    head = m * head_seconds(anatomy, _alike(plan), machine, software)
    spent: dict[str, float] = dict.fromkeys((DATA, STAGE, CONTEXT, EXPERT, MODEL), 0.0)
    for entry in transfers(anatomy, plan):
        spent[axis_of(entry)] += transfer_time(entry, anatomy, plan, machine)
    ring = ring_seconds(anatomy, plan, machine)
    exposed = exposed_by_axis(spent, plan, software, products, products + attention + element_wise)
    exposed[CONTEXT] = exposed_turns(spent[CONTEXT], ring, plan, attention)
    exposed[MODEL] -= hidden_sums(anatomy, plan, machine, products)
    if plan.overlaps_data(anatomy.model):
        beside = exposed[MODEL] if plan.mesh.size > server.gpus else 0.0  # on other links, and as good as computing
        compute = products + attention + element_wise + beside
        by_letter = _by_letter(anatomy, plan, machine, software, beside)
        exposed[DATA] = exposed_ahead(anatomy, plan, machine, compute, by_letter)
    hidden = {axis: spent[axis] - exposed[axis] for axis in spent}
    slowed = machine.contention(sum(hidden.values()))
    per_step = products + attention + element_wise + head + slowed
    per_step += sum(exposed[axis] for axis in (MODEL, STAGE, CONTEXT, EXPERT))
    return StepTime(
        products=products,
        attention=attention,
        element_wise=element_wise,
        logits=head,
        model_axis=exposed[MODEL],
        stage_axis=exposed[STAGE],
        bubble=per_step * megatron_bubble(plan.pipeline_schedule, plan.mesh.stage, m, plan.chunks),
        data_axis=exposed[DATA],
        optimizer=_optimizer(anatomy, plan, machine, software),
        copies=_copies(_all_copies(anatomy, plan), machine, software),
        contention=slowed,
        context_axis=exposed[CONTEXT],
        expert_axis=exposed[EXPERT],
        teacher=_teacher(plan, machine, software),
        hidden=hidden,
    )


def least_seconds(anatomy: Anatomy, plan: Plan, server: Server, software: Software = MTJAX) -> float:
    """Returns a lower bound of `step_time`: of the layers' kernels, with the bubble of stages in lockstep."""
    machine = _machine(server, plan.element_bytes, None)
    if not plan.is_staged:
        plan = _as_run_by(software, plan)
        # A bound that is above the time by a rounding error would rule out the plan itself.
        return (1 - ROUNDING) * plan.microbatches * sum(_layers(anatomy, plan, machine, software))
    alike = _alike(plan)
    longest = max(
        _longest(section, plan, [(sum(_of_layer(anatomy, stack, alike, machine, software)),) for stack in section])
        for section in anatomy.sections
    )
    ticks = num_ticks(plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.sections))
    return (1 - ROUNDING) * ticks * longest


def _as_run_by(software: Software, plan: Plan) -> Plan:
    """Returns the plan with what the software's recompute leaves out."""
    drops = software.drops_last_reduction
    return plan if plan.drops_last_reduction == drops else replace(plan, drops_last_reduction=drops)


def _lock_step_time(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> StepTime:
    """Returns the seconds of a step of a pipeline, whose stages run a timetable in lockstep, idle or not.

    A tick takes as long as the slowest stage's chunk, and the bubble is the time of all ticks beyond the useful work,
    that of a stage on average.
    """
    sections, m, alike = len(anatomy.sections), plan.microbatches, _alike(plan)
    ticks = num_ticks(plan.mesh.stage, m, plan.chunks * sections)

    def of_layer(stack: StackParts) -> tuple[float, ...]:
        """Returns the seconds of one of its layers: products, attention, element-wise, copies."""
        made = [*copies_in_turn(stack, anatomy.model, plan), *block_copies(stack, anatomy.model, plan)]
        return *_of_layer(anatomy, stack, alike, machine, software), _copies(made, machine, software)

    each, chunks_of_layers = (
        [(section, list(map(of_layer, section))) for section in anatomy.sections],
        plan.mesh.stage * plan.chunks,
    )
    means = [_added([stack.layers / chunks_of_layers for stack in section], times) for section, times in each]
    products, attention, element_wise, copied = (m * plan.chunks * sum(mean[i] for mean in means) for i in range(4))
    work = products + attention + element_wise + copied
    longest = max(_longest(section, plan, times) for section, times in each)
    last = anatomy.sections[-1]
    forward = [(layer_forward_seconds(stack, alike, machine, software),) for stack in last]
    ahead = _longest(last, plan, forward)
    # The losses are computed in the ticks in which the last stage runs its last chunk. With full recompute it skips
    # that chunk's forward half, in the same tick except in GPipe, and the losses add what they take beyond it.
    skipped = (
        sum(_added(layers_of_chunks(last, plan)[-1], forward))
        if plan.recompute == "full" and plan.pipeline_schedule != "gpipe" and not plan.context_parallelism
        else 0.0
    )
    # Slots that a stage skips take no time, but what layers in them would send counts.
    spent = spent_on_stages(anatomy, plan, machine)
    # Share of ticks with work: what layers send in the others is part of the bubble.
    counts = m * plan.chunks * sections / ticks
    beside = hidden_in_ticks(anatomy, plan, spent[MODEL], products / counts)
    on_layers, to_experts = spent[MODEL] - beside, spent[EXPERT]
    sent = exposed_sends(anatomy, plan, spent[STAGE] / ticks, ahead, longest - ahead)
    turns = exposed_turns(spent[CONTEXT], ring_seconds(anatomy, plan, machine), plan, attention / counts)
    return StepTime(
        products=products,
        attention=attention,
        element_wise=element_wise,
        logits=m * max(0.0, head_seconds(anatomy, alike, machine, software) - skipped),
        model_axis=on_layers * counts + spent[LOSS_FORWARD],
        stage_axis=sent + spent[GRADIENTS],
        bubble=ticks * longest - work + (on_layers + to_experts + turns) * (1 - counts),
        data_axis=spent[DATA],
        optimizer=_optimizer(anatomy, plan, machine, software),
        copies=copied + _copies([*copies_in_step(anatomy, plan), *table_copies(anatomy, plan)], machine, software),
        contention=machine.contention(spent[STAGE] - sent + spent[CONTEXT] - turns + beside),
        context_axis=turns * counts,
        expert_axis=to_experts * counts,
        teacher=_teacher(plan, machine, software),
        hidden=dict.fromkeys((DATA, EXPERT), 0.0)
        | {MODEL: beside, STAGE: spent[STAGE] - sent, CONTEXT: spent[CONTEXT] - turns},
    )


def _added(counts: Iterable[float], times: Sequence[Sequence[float]]) -> list[float]:
    """Adds up the seconds of as many layers of each stack as `counts` says, cause by cause."""
    return [sum(n * seconds for n, seconds in zip(counts, cause, strict=True)) for cause in zip(*times, strict=True)]


def _longest(section: tuple[StackParts, ...], plan: Plan, times: Sequence[Sequence[float]]) -> float:
    """Returns the seconds of the chunk of a section that takes longest, of those of a layer of each stack by cause."""
    return max(sum(_added(counts, times)) for counts in set(layers_of_chunks(section, plan)))


def _of_layer(
    anatomy: Anatomy, stack: StackParts, plan: Plan, machine: Machine, software: Software
) -> tuple[float, float, float]:
    """Returns the seconds of one layer of a model and one microbatch, all passes: products, attention, element-wise."""
    frozen = () if trains_all(anatomy.model) else anatomy.frozen_parts(stack)
    return layer_seconds(stack, plan, machine, software, frozen)


def _by_letter(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software, beside: float) -> dict[str, float]:
    """Returns the seconds of a layer of each letter in a step, with its part of what is `beside` them; {} where not
    mixed."""
    if not is_mixed(anatomy, plan):
        return {}
    each = beside / sum(stack.layers for stack in anatomy.stacks)
    alike, m = _alike(plan), plan.microbatches
    return {s.letter: m * sum(_of_layer(anatomy, s, alike, machine, software)) + each for s in anatomy.stacks}


def _layers(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> tuple[float, float, float]:
    """Returns the seconds of a stage's layers and one microbatch, all passes: products, attention, element-wise."""
    wide = sum(plan.fp8_ends)
    each = [
        (count, _of_layer(anatomy, stack, alike, machine, software))
        for stack in anatomy.stacks
        for count, alike in (
            (stack.layers // plan.mesh.stage - wide, _alike(plan)),
            (wide, _alike(replace(plan, fp8="none"))),
        )
        if count
    ]
    products, attention, element_wise = (sum(n * times[i] for n, times in each) for i in range(3))
    return products, attention, element_wise


@cache
def _alike(plan: Plan) -> Plan:
    """Returns the plan as far as computing a microbatch depends on it: plans that differ in the rest share its time."""
    ways = {axis: plan.mesh.degree((axis,)) for axis in (CONTEXT, EXPERT, MODEL)}
    mesh = MeshShape(stage=min(plan.mesh.stage, 2), **ways)
    same: dict[str, Any] = {
        "zero": 0,
        "pipeline_schedule": "1f1b",
        "chunks": 1,
        "layers_per_stage": None,
        "teacher": None,
    }
    return replace(plan, mesh=mesh, global_batch_size=1, **same)


def _teacher(plan: Plan, machine: Machine, software: Software) -> float:
    """Returns the seconds of the forward pass of a teacher, of all microbatches or in all ticks."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    (anatomy, teacher_plan), turns = teacher, plan.microbatches
    if teacher_plan.is_staged:
        turns = num_ticks(
            teacher_plan.mesh.stage, teacher_plan.microbatches, teacher_plan.chunks * len(anatomy.sections)
        )
    each = (
        _longest(
            section,
            teacher_plan,
            [(layer_forward_seconds(s, _alike(teacher_plan), machine, software),) for s in section],
        )
        for section in anatomy.sections
    )
    sent = (machine.transfer(e, members_inside(teacher_plan, e.axis, machine.server)) for e in teacher_transfers(plan))
    return turns * sum(each) + sum(sent)


def _all_copies(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Copies of a step without stages."""
    found = copies(anatomy, plan)
    for stack in anatomy.stacks:
        times = plan.microbatches * layers_in_chunk(stack, plan)
        found += [copy._replace(times=times * copy.times) for copy in block_copies(stack, anatomy.model, plan)]
    return found


def table_copies(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Copies of the sums of gradients of tables outside the layers, in every tick's backward half.

    XLA: a branch that does not add to a sum copies it, and so does the tick around it where the embedding and the
    losses have a table each. With one table for both a single copy is left.
    """
    ticks = num_ticks(plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.sections))
    tables = [weight for part in anatomy.outside for weight in part.weights if "vocab" in weight.names[:1]]
    layout, each = plan.layout(anatomy.model), 1 if output_is_tied(anatomy.model) else 2
    found = []
    for weight in tables:
        if len(weight.shape) > 1 and is_trainable(anatomy.model, weight.name):
            on_rank = on_device(weight, layout, plan.mesh) / (
                zero_degree(weight, layout, plan.mesh) if plan.zero >= 2 else 1
            )
            found.append(Copy(SUMS, 2 * FLOAT32 * on_rank, each * ticks))
    return found


def _copies(found: list[Copy], machine: Machine, software: Software) -> float:
    """Returns the seconds of copies, where layers are in loops."""
    return sum(copy.times * machine.kernel(copy.size) for copy in found) if software.loops_over_layers else 0.0


def _optimizer(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> float:
    """Returns the seconds to read and write what the optimizer updates on this GPU, to read the gradients once more for
    their norm, and of Muon's products or of exposed copies of offloaded states."""
    precision, counts = plan.precision, peak_stage_counts(anatomy, plan)
    shards, of_experts = (plan.zero_degree, plan.expert_zero_degree) if plan.zero else (1, 1)
    stored = precision.matrices if precision.are_masters and not plan.offloads_parameters else precision.weights
    # Weights and moments are read and written, gradients read twice: for their norm and for the update.
    states = 2 * (stored + precision.optimizer) + 2 * precision.gradients
    parameters_of_rank = counts.shared.all / shards + counts.experts / of_experts
    if plan.residuals == "jax" and plan.optimizer.name != "adamw":
        # Other optimizers have states of other shapes, which `state_bytes` counts.
        states -= 2 * precision.optimizer
        moved = parameters_of_rank * (states + software.kernels.optimizer_extra) + 2 * state_bytes(anatomy, plan)
        return machine.passes(moved) + _newton_schulz(anatomy, plan, machine)
    seconds = machine.passes(parameters_of_rank * (states + software.kernels.optimizer_extra))
    return seconds + exposed_host_bytes(anatomy, plan) / machine.host_bandwidth


def _newton_schulz(anatomy: Anatomy, plan: Plan, machine: Machine) -> float:
    """Returns the seconds of Muon's products, on each device."""
    seconds = 0.0
    for e in exchanges(anatomy, plan):
        small, large = sorted((e.rows, e.columns))
        products = machine.product(small, large, small, e.entire) + machine.product(small, small, small, e.entire)
        seconds += ITERATIONS * (products + machine.product(small, small, large, e.entire))
    return seconds
