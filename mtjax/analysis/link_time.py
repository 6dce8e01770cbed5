"""Seconds that a step's collectives take on the links they cross, and what of them nothing hides."""

from collections.abc import Mapping
from functools import cache

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.contract import (
    EMBEDDING_BACKWARD,
    EMBEDDING_FORWARD,
    GRADIENTS,
    JOINED,
    LAYER_BACKWARD,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    OPTIMIZER,
    PARAMETERS,
)
from mtjax.analysis.counts import stage_counts
from mtjax.analysis.hardware import Server
from mtjax.analysis.machine import Machine
from mtjax.analysis.parts.experts import exchanged_share
from mtjax.analysis.pattern_time import exposed_in_pattern
from mtjax.analysis.schedules import full_ticks
from mtjax.analysis.software import Software
from mtjax.analysis.traffic import Transfer, transfers
from mtjax.config.adapters import trains_all
from mtjax.layout.mesh import AXES, MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.rules import CONTEXT, DATA, EXPERT, MODEL, STAGE
from mtjax.layout.stages import layers_in_chunk
from mtjax.layout.timetable import num_ticks


def members_inside(plan: Plan, axis: str, server: Server) -> int:
    """Returns how many ranks of one group of a mesh axis, or of several, sit in the same server: inner axes vary
    fastest."""
    return _members_inside(plan.mesh, axis, server.gpus)


@cache
def _members_inside(mesh: MeshShape, axis: str, gpus: int) -> int:
    axes = tuple(axis.split(JOINED))
    # Neighbours along an axis are as many places apart as the axes inside it have ranks.
    stride = mesh.degree(AXES[AXES.index(axes[-1]) + 1 :])
    return max(1, min(mesh.degree(axes), gpus // stride))


def transfer_time(entry: Transfer, anatomy: Anatomy, plan: Plan, machine: Machine) -> float:
    """Returns the seconds of a collective in a step, until the rank with most of it is done."""
    alone = machine.transfer(entry, members_inside(plan, entry.axis, machine.server))
    return alone * _fullest_load(entry, anatomy, plan)


def _fullest_load(entry: Transfer, anatomy: Anatomy, plan: Plan) -> float:
    """Returns how much longer a collective takes than one of equal loads: an exchange of tokens as long as the rank
    with most has tokens to take, at most all of them."""
    if entry.operation != "ragged-all-to-all":
        return 1.0
    return min(plan.expert_imbalance, 1 / exchanged_share(anatomy.model, entry.group_size))


def axis_of(entry: Transfer) -> str:
    """Returns the axis under which its time counts: gradients, parameters and updates under `data`, whatever they cross
    with it."""
    return DATA if entry.phase in (GRADIENTS, PARAMETERS, OPTIMIZER) and entry.axis != STAGE else entry.axis


def spent_on_stages(anatomy: Anatomy, plan: Plan, machine: Machine) -> dict[str, float]:
    """Returns the seconds of a step's collectives on stages: of layers by axis; of the losses, and of gradients over
    the stages.

    Those of the embedding, which only the first stage has, pass behind the losses of the last.
    """
    spent: dict[str, float] = dict.fromkeys((DATA, STAGE, CONTEXT, EXPERT, MODEL, LOSS_FORWARD, GRADIENTS), 0.0)
    for entry in transfers(anatomy, plan):
        kind = axis_of(entry)
        if kind == MODEL and entry.phase in (LOSS_FORWARD, LOSS_BACKWARD):
            kind = LOSS_FORWARD
        elif kind == STAGE and entry.phase == GRADIENTS:
            kind = GRADIENTS
        if entry.phase not in (EMBEDDING_FORWARD, EMBEDDING_BACKWARD):
            spent[kind] += transfer_time(entry, anatomy, plan, machine)
    return spent


def exposed_sends(anatomy: Anatomy, plan: Plan, both: float, ahead: float, back: float) -> float:
    """Returns the seconds of what stages send each other that no half tick hides.

    Gradients travel behind the forward half of a tick, activations behind the backward half; where a tick has one half
    only, nothing hides what it sends.

    Args:
      anatomy: of the model.
      plan: on stages.
      both: seconds of a tick's two permutes.
      ahead: seconds of a forward half.
      back: seconds of a backward half.
    """
    counts = (plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.sections))
    ticks, full, one = num_ticks(*counts), full_ticks(plan.pipeline_schedule, *counts), both / 2
    return (ticks - full) * both + full * (max(0.0, one - ahead) + max(0.0, one - back))


def exposed_by_axis(
    spent: dict[str, float], plan: Plan, software: Software, products: float, compute: float
) -> dict[str, float]:
    """Returns the part of each axis' communication that nothing hides."""
    exposed = dict(spent)
    if software.overlaps_model_axis and plan.sequence_parallel:
        # Nothing hides the first of t pieces.
        first = spent[MODEL] / plan.mesh.model
        exposed[MODEL] = first + max(0.0, spent[MODEL] - first - products)
    if software.overlaps_data_axis:
        # Gradients of a layer can't leave before its last backward pass, nor parameters arrive after its first use.
        # Parameters in parts are gathered in each microbatch.
        exposed[DATA] = max(0.0, spent[DATA] - (compute if plan.zero == 3 else compute / plan.microbatches))
    if plan.pipeline_schedule == "interleaved":
        exposed[STAGE] = 0.0
    return exposed


def exposed_ahead(
    anatomy: Anatomy, plan: Plan, machine: Machine, compute: float, by_letter: Mapping[str, float]
) -> float:
    """Returns the seconds of gathers and sums over data ranks that other layers do not hide.

    Args:
      anatomy: of the model.
      plan: of layers whose parameters and gradients travel while others compute.
      machine: on which they run.
      compute: seconds of all layers, both passes.
      by_letter: of a layer of each letter of a pattern, in which neighbours hide each other's; empty without one.
    """
    sent, last, groups = {PARAMETERS: 0.0, GRADIENTS: 0.0}, 0.0, set[tuple[str, int]]()
    for entry in transfers(anatomy, plan):
        if axis_of(entry) == DATA:
            seconds = transfer_time(entry, anatomy, plan, machine)
            # What sharding groups send each other comes after the last layer's backward pass, as does the update.
            if entry.phase == OPTIMIZER or (entry.axis == DATA and plan.mesh.has_sharding_groups):
                last += seconds
            else:
                sent[entry.phase] += seconds
                groups.add((entry.axis, entry.group_size))
    # A backward pass takes twice as long as a forward pass, and recompute as long as one.
    forward = compute / (4 if plan.recompute == "full" else 3)
    gathers, again, upfront = sent[PARAMETERS], 0.0, 0.0
    if plan.zero == 3:
        # What is outside the layers is gathered before the first layer and summed after its backward pass, behind
        # nothing.
        share = _outside(anatomy, plan)
        last += share * sent[GRADIENTS] + share / (2 - share) * gathers
        sent[GRADIENTS] *= 1 - share
        # Layers are gathered twice and what is outside once, so that their times are as 2 (1 - share) to share.
        gathers = again = gathers * (1 - share) / (2 - share)
    elif plan.microbatches > 1:  # ZeRO-1 and 2 gather everything before the first
        gathers, upfront = 0.0, gathers
    if by_letter:
        each = plan.microbatches * _latency(groups, plan, machine)
        return upfront + last + exposed_in_pattern(anatomy, plan, (gathers, again, sent[GRADIENTS]), by_letter, each)
    waits = max(0.0, gathers - forward) + max(0.0, again + sent[GRADIENTS] - (compute - forward))
    return upfront + last + waits


def _latency(groups: set[tuple[str, int]], plan: Plan, machine: Machine) -> float:
    """Returns the seconds of an all-gather of next to nothing over the slowest of these groups of ranks, each of axes
    and a degree."""
    least = (Transfer(axis, degree, "all-gather", "", 1, 1, 1) for axis, degree in groups)
    return max((machine.transfer(one, members_inside(plan, one.axis, machine.server)) for one in least), default=0.0)


def ring_seconds(anatomy: Anatomy, plan: Plan, machine: Machine) -> float:
    """Returns the seconds of a step's ring steps of attention."""
    if not plan.context_parallelism or plan.context_method != "ring":
        return 0.0
    ring = (e for e in transfers(anatomy, plan) if e.axis == CONTEXT and e.operation == "collective-permute")
    return sum(transfer_time(entry, anatomy, plan, machine) for entry in ring)


def _outside(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the share of a device's parameters that is outside the layers."""
    counts = stage_counts(anatomy, plan)
    return 1 - counts.in_layers / counts.all


def hidden_sums(anatomy: Anatomy, plan: Plan, machine: Machine, products: float) -> float:
    """Returns the seconds of a step's collectives over tensor parallel ranks that pass behind the gradients of
    matrices: in the backward pass, those of each layer's first component. None where matrices are frozen.

    Args:
      anatomy: of the model.
      plan: without stages.
      machine: on which it runs.
      products: seconds of the products of all layers.
    """
    if plan.residuals != "jax" or (plan.zero == 3 and plan.splits_stream):  # parameters are sent at that time
        return 0.0
    if not trains_all(anatomy.model):
        return 0.0
    sums = (entry for entry in transfers(anatomy, plan) if (entry.axis, entry.phase) == (MODEL, LAYER_BACKWARD))
    seconds = sum(transfer_time(entry, anatomy, plan, machine) for entry in sums)
    firsts = sum(stack.layers for stack in anatomy.stacks)
    components = sum(stack.layers * len(stack.sublayers) for stack in anatomy.stacks)
    return min(seconds * firsts / components, products / (4 if plan.recompute == "full" else 3))


def hidden_in_ticks(anatomy: Anatomy, plan: Plan, spent: float, products: float) -> float:
    """Returns the seconds of a step's collectives over tensor parallel ranks that pass behind products on stages.

    XLA: chunks of one layer are in no loop, so that the collectives of one half of a tick run beside the products of
    the other: half of their time, read off two programs, and no longer than half of the products.

    Args:
      anatomy: of the model.
      plan: on stages.
      spent: seconds of the collectives of all ticks.
      products: seconds of the products of all ticks.
    """
    return 0.5 * min(spent, products) if all(layers_in_chunk(stack, plan) == 1 for stack in anatomy.stacks) else 0.0


def exposed_turns(spent: float, ring: float, plan: Plan, attention: float) -> float:
    """Returns the seconds of context parallel communication that attention does not hide.

    A ring overlaps its sends with computation, except the last send of each backward pass; an all-gather precedes the
    computation, and so do the states of layers with a recurrent state.

    Args:
      spent: seconds of all of it.
      ring: of it, of ring steps.
      plan: of the step.
      attention: seconds of attention.
    """
    last = ring / (3 * plan.mesh.context)
    return spent - ring + min(ring, last + max(0.0, ring - last - attention))
