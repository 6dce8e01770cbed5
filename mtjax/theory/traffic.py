"""What a GPU sends in a step, by mesh axis and purpose: the contract's lines for a plan, and the stages."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtjax.theory.anatomy import Anatomy
from mtjax.theory.communication import contract_of, symbols_of
from mtjax.theory.contract import (
    EMBEDDING_FORWARD,
    GRADIENTS,
    JOINED,
    LAYER_FORWARD,
    PARAMETERS,
    STAGES,
    Expectation,
    requirements,
)
from mtjax.theory.plan import Plan
from mtjax.theory.rules import CONTEXT, DATA, EXPERT, MODEL, STAGE
from mtjax.theory.teacher_cost import teacher_of

AXIS_NAMES = {
    DATA: "data ways",
    STAGE: "stages",
    CONTEXT: "context ways",
    EXPERT: "expert ways",
    MODEL: "model ways",
}
"""How people call the ways of a mesh axis."""


def axis_name(axis: str) -> str:
    """How people call the ways of an axis, or of several that a collective crosses together."""
    return " x ".join(AXIS_NAMES[one] for one in axis.split(JOINED))


def ring_factor(operation: str, ways: int) -> float:
    """Bytes that a device sends per byte of the full array, by the ring algorithms.

    All-reduce 2(n-1)/n; gather, scatter and all-to-all (n-1)/n; point to point 1 (arXiv 2104.04473, section 3).
    """
    if ways <= 1:
        return 0.0
    if operation == "all-reduce":
        return 2 * (ways - 1) / ways
    shared = ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")
    return (ways - 1) / ways if operation in shared else 1.0


@dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step."""

    axis: str
    """The mesh axis that it crosses, or several, as a contract's line names them."""
    ways: int
    operation: str
    """`send`, or a kind of collective."""
    purpose: str
    count: float
    """Per GPU and step."""
    elements: float
    """Of the full array (the gathered side of gather and scatter); those that are expected to be sent."""
    element_bytes: int
    phase: str = ""
    """Of the contract."""

    @property
    def size(self) -> float:
        """Bytes of the full array."""
        return self.elements * self.element_bytes

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends in a step, ring factor included."""
        return self.count * self.size * ring_factor(self.operation, self.ways)


def transfers(anatomy: Anatomy, plan: Plan) -> list[Transfer]:
    """Everything a GPU sends in a step; on stages, a GPU of the stage with the layers and both ends' extras."""
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
        for required in requirements(contract_of(anatomy, plan), symbols_of(anatomy, plan), plan.mesh, "float32")
        if required.elements
    ]
    return sent if plan.is_staged else [*sent, *_between_stages(anatomy, plan)]


def teacher_transfers(plan: Plan) -> list[Transfer]:
    """What a GPU sends for the forward pass of a teacher that the plan knows: of a step's permutes and gathers of
    ZeRO-3 half."""
    teacher = teacher_of(plan)
    if teacher is None:
        return []
    halves = {EMBEDDING_FORWARD: 1.0, LAYER_FORWARD: 1.0, STAGES: 0.5} | ({PARAMETERS: 0.5} if plan.zero == 3 else {})
    return [
        replace(entry, count=entry.count * halves[entry.phase], purpose=f"teacher, {entry.purpose}")
        for entry in transfers(*teacher)
        if entry.phase in halves
    ]


def _element_bytes(line: Expectation, plan: Plan) -> int:
    if line.axis != STAGE and line.phase == GRADIENTS:
        return plan.precision.reduced
    if line.phase == PARAMETERS and plan.zero < 3 and plan.precision.gathered is not None:
        return plan.precision.gathered
    return {"compute": plan.element_bytes, "float32": 4, "bfloat16": 2, "int32": 4}[line.dtype]


def _between_stages(anatomy: Anatomy, plan: Plan) -> Iterator[Transfer]:
    """Megatron's activations forward and their gradients back, split over the model ways with the sequence."""
    stages = plan.mesh.stage
    if stages == 1:
        return
    hidden = plan.microbatch_size * sum(stack.tokens * stack.hidden for stack in anatomy.stacks)
    split = plan.mesh.model if plan.sequence_parallel else 1
    count = 2 * plan.microbatches * plan.chunks
    purpose = "activations and their gradients"
    yield Transfer(STAGE, stages, "send", purpose, count, hidden / split, plan.element_bytes)


def sent_by_axis(entries: list[Transfer]) -> dict[str, float]:
    """Bytes that a GPU sends in a step over each mesh axis that is used."""
    axes = dict.fromkeys(entry.axis for entry in entries)
    return {axis: sum(e.sent for e in entries if e.axis == axis) for axis in axes}


def sent_to_experts(anatomy: Anatomy, plan: Plan) -> float:
    """Bytes that a GPU sends in a step so that tokens meet the experts of other ranks."""
    return sent_by_axis(transfers(anatomy, plan)).get(EXPERT, 0.0)


def bandwidth_demand(sent: float, compute_seconds: float, exposed_share: float) -> float:
    """Bytes per second that keep communication under `exposed_share` of the compute time it serves."""
    return sent / (compute_seconds * exposed_share)
