"""Bytes that a GPU sends in a step, by mesh axis and purpose: the contract's lines, and Megatron's stage boundaries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.communication import contract_of, symbols_of
from mtjax.analysis.contract import (
    EMBEDDING_FORWARD,
    GRADIENTS,
    JOINED,
    LAYER_FORWARD,
    PARAMETERS,
    STAGES,
    Expectation,
    requirements,
)
from mtjax.analysis.teacher_cost import teacher_of
from mtjax.layout.mesh import PARALLELISM
from mtjax.layout.plan import Plan
from mtjax.layout.rules import EXPERT, STAGE

RING_PASSES: Mapping[str, int] = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-permute": 0,
    "collective-broadcast": 0,
    "send": 0,
    "recv": 0,
}
"""Kind of a collective -> passes of its ring algorithm, in each of which a device sends (n-1)/n of the array (an
all-reduce is a reduce-scatter and an all-gather); 0 for point to point."""


def axis_name(axis: str) -> str:
    """Returns the kind of parallelism of the axes that a collective crosses: "tensor", "data x expert"."""
    return " x ".join(PARALLELISM[one] for one in axis.split(JOINED))


def ring_factor(operation: str, ranks: int) -> float:
    """Returns the bytes that a device sends per byte of the full array, by the ring algorithms.

    All-reduce 2(n-1)/n; all-gather, reduce-scatter and all-to-all (n-1)/n; point to point 1 (arXiv 2104.04473, section
    3), as of kinds that `RING_PASSES` lacks, which reports of compiled programs name.
    """
    if ranks <= 1:
        return 0.0
    passes = RING_PASSES.get(operation, 0)
    return passes * (ranks - 1) / ranks if passes else 1.0


@dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step."""

    axis: str
    """The mesh axis that it crosses, or several, as a contract's line names them."""
    group_size: int
    """Ranks per group."""
    operation: str
    """`send`, or a kind of collective."""
    purpose: str
    count: float
    """Per GPU and step."""
    elements: float
    """Of the full array (the gathered side of all-gather and reduce-scatter) that are expected to be sent."""
    element_bytes: int
    phase: str = ""
    """Phase of the contract's line."""

    @property
    def size(self) -> float:
        """Bytes of the full array."""
        return self.elements * self.element_bytes

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends in a step, ring factor included."""
        return self.count * self.size * ring_factor(self.operation, self.group_size)


def transfers(anatomy: Anatomy, plan: Plan) -> list[Transfer]:
    """Returns everything a GPU sends in a step; with pipeline parallelism it has the traffic of both end stages too."""
    sent = [
        Transfer(
            required.line.axis,
            plan.mesh.degree(required.line.axes),
            required.line.kind,
            f"{required.line.phase}: {required.line.why}",
            required.count,
            required.elements if required.sent is None else required.sent,
            _element_bytes(required.line, plan),
            required.line.phase,
        )
        # "float32" is arbitrary: the bytes of an element follow from the line and the plan, as Megatron's differ from
        # ours.
        for required in requirements(contract_of(anatomy, plan), symbols_of(anatomy, plan), plan.mesh, "float32")
        if required.elements
    ]
    # Only mtjax's stages have lines in the contract.
    return sent if plan.is_staged else [*sent, *_between_stages(anatomy, plan)]


def teacher_transfers(plan: Plan) -> list[Transfer]:
    """Returns what a GPU sends for the forward pass of the plan's teacher; empty without one."""
    teacher = teacher_of(plan)
    if teacher is None:
        return []
    # Stage-boundary permutes and the all-gathers of ZeRO-3: the forward half of a step's.
    halves = {EMBEDDING_FORWARD: 1.0, LAYER_FORWARD: 1.0, STAGES: 0.5} | ({PARAMETERS: 0.5} if plan.zero == 3 else {})
    return [
        replace(entry, count=entry.count * halves[entry.phase], purpose=f"teacher, {entry.purpose}")
        for entry in transfers(*teacher)
        if entry.phase in halves
    ]


def _element_bytes(line: Expectation, plan: Plan) -> int:
    """Returns bytes per element of a line: gradients and gathered parameters as the plan's precision sends them."""
    # Whatever type a line has for the check: Megatron's runs reduce in other types than ours.
    if line.axis != STAGE and line.phase == GRADIENTS:
        return plan.precision.reduced
    if line.dtype.startswith("float8"):
        return 1
    if line.phase == PARAMETERS and plan.zero < 3 and plan.precision.gathered is not None:
        return plan.precision.gathered
    return {"compute": plan.element_bytes, "float32": 4, "bfloat16": 2, "int32": 4}.get(line.dtype, 1)


def _between_stages(anatomy: Anatomy, plan: Plan) -> Iterator[Transfer]:
    """Yields Megatron's stage-boundary activations and gradients; with sequence parallelism a tensor rank's shard."""
    stages = plan.mesh.stage
    if stages == 1:
        return
    hidden = plan.microbatch_size * sum(stack.tokens * stack.hidden for stack in anatomy.stacks)
    shards = plan.mesh.model if plan.sequence_parallel else 1
    count = 2 * plan.microbatches * plan.chunks
    purpose = "activations and their gradients"
    yield Transfer(STAGE, stages, "send", purpose, count, hidden / shards, plan.element_bytes)


def sent_by_axis(entries: list[Transfer]) -> dict[str, float]:
    """Returns the bytes that a GPU sends in a step over each mesh axis that is used."""
    axes = dict.fromkeys(entry.axis for entry in entries)
    return {axis: sum(e.sent for e in entries if e.axis == axis) for axis in axes}


def sent_to_experts(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes that a GPU sends in a step over the expert parallel ranks."""
    return sent_by_axis(transfers(anatomy, plan)).get(EXPERT, 0.0)


def bandwidth_demand(sent: float, compute_seconds: float, exposed_share: float) -> float:
    """Returns the bytes per second that keep communication under `exposed_share` of the compute time."""
    return sent / (compute_seconds * exposed_share)
