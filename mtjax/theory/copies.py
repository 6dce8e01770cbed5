"""What loops over layers copy: bytes through memory that no kernel of the model asks for.

Each factor was read off programs compiled for H100 and H200 (`mtjax inspect`, "memory-bound, by cause"), and none is
fitted. A copy reads and writes: two bytes move for each. c are the bytes of the compute type; parameters, and sums of
gradients, have 4.

- What a layer keeps for its backward pass is copied into a stack (2) and out of it again (2), and the stack is zeros
  first (1): five times what the parts say that they keep. Stages which don't recompute in full copy it into a slot and
  out of it besides (4). One layer in a loop, as in a stage's chunk of one, needs no stack.
- Matrices are cast as they come out of their stack, forward and again on the way back: 4 + c bytes an element each
  time, and a third time where a stage computes its chunk again before. With one microbatch the way back copies them in
  float32 (8) and its products cast what they read. What ZeRO-1 and 2 have gathered is cast already: 2c each time.
- Gradients of several microbatches: a layer's sums are copied out (8), then read beside the new gradient, and written
  (8, and the gradient's own bytes). Those of one microbatch are copied into zeros (8 and 4).
- Gradients that leave at once are widened to float32 before (4 + c).
- Once a step: zeros for the sums (4); ZeRO-1's sums copied out, and laid out for the scatter (16); of parameters that
  ZeRO-1 and 2 gather a rank's part cast (4 + c), and the whole written into stacks (2c) that are filled first (c).
- Layers without a loop have no stacks: their matrices are cast (4 + c), and their gradients stacked (8), once a step.

ZeRO-2 and 3 add up, and all stages cast, a rank's own part. A copy takes no less than a launch, which is what it takes
for vectors. Left out: what is outside the layers, experts' blocks (`mtjax.theory.expert_blocks`), wires between stages,
transposes of what is gathered, and vectors where they only come out of their stack, mostly within another kernel. Full
recompute in groups is taken for that of single layers, as in all formulas of time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from mtjax.config import Model
from mtjax.theory.adapters import is_trainable
from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.counts import on_device, zero_axes, zero_degree
from mtjax.theory.layout import Layout, gathers_in_compute_dtype
from mtjax.theory.memory import kept_in_turn
from mtjax.theory.mesh import MeshShape
from mtjax.theory.parts.part import Weight
from mtjax.theory.plan import Plan
from mtjax.theory.stages import layers_in_chunk

KEPT = "kept, into stacks and out of them"
ZEROS = "zeros for stacks"
CASTS = "matrices cast"
SUMS = "gradients added up"
SENT = "gradients widened to be sent"
PARTS = "ZeRO's parts of stacks"

FLOAT32 = 4


class Copy(NamedTuple):
    """Kernels that are alike."""

    kind: str
    size: float
    """Bytes that one of them reads and writes."""
    times: float = 1
    """How many of them run."""

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.times * self.size


@dataclass(frozen=True)
class _Held:
    """What a rank has of a parameter of one layer."""

    elements: int
    own: float
    """Of them, those that are left where ZeRO splits the parameter."""
    is_matrix: bool
    """Whether products take it in the compute type."""
    is_learnt: bool
    is_shared: bool
    """Whether other ranks have the same, but for what ZeRO splits."""

    @property
    def is_split(self) -> bool:
        return self.own < self.elements


def copies(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Copies of a step on a GPU; on stages, of the microbatches that count."""
    turns = plan.microbatches * (plan.chunks if plan.is_staged else 1)
    found = copies_in_step(anatomy, plan)
    for stack in anatomy.stacks:
        n = turns * layers_in_chunk(stack, plan)
        found += [copy._replace(times=n * copy.times) for copy in copies_in_turn(stack, anatomy.model, plan)]
    return found


def copies_in_turn(stack: Stack, model: Model, plan: Plan) -> list[Copy]:
    """Copies for one layer and microbatch, forward and backward."""
    held = _held(stack, model, plan.layout(model), plan.mesh)
    turn = list(_sent(held, plan))
    if not plan.unrolled:
        turn += [*_kept(stack, plan), *_casts(held, plan), *_sums(held, plan)]
    return turn


def copies_in_step(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Copies that are made once, however many microbatches there are."""
    found: list[Copy] = []
    for stack in anatomy.stacks:
        layers = layers_in_chunk(stack, plan) * (plan.chunks if plan.is_staged else 1)
        for one in _held(stack, anatomy.model, plan.layout(anatomy.model), plan.mesh):
            found += _once(one, plan, layers)
    return found


def _kept(stack: Stack, plan: Plan) -> Iterator[Copy]:
    layers = layers_in_chunk(stack, plan)
    in_slots = plan.is_staged and plan.recompute != "full"
    for size in kept_in_turn(stack, plan).values():
        if size and layers > 1:
            yield Copy(KEPT, 2 * size / layers, 2)
            yield Copy(ZEROS, size, 1 / layers)
        if size and in_slots:
            yield Copy(KEPT, 2 * size, 2 / layers)


def _casts(held: Sequence[_Held], plan: Plan) -> Iterator[Copy]:
    passes = 3 if plan.recompute == "full" and plan.is_staged else 2
    each = FLOAT32 + plan.element_bytes
    for one in held:
        if not one.is_matrix:
            continue
        if _is_gathered_once(one, plan):
            yield Copy(CASTS, 2 * plan.element_bytes * one.elements, passes)
        elif plan.zero == 3 and one.is_split:
            yield Copy(CASTS, each * one.own, passes)
        elif _adds_up(plan):
            yield Copy(CASTS, each * one.elements, passes)
        else:
            yield Copy(CASTS, each * one.elements)
            yield Copy(CASTS, 2 * FLOAT32 * one.elements)


def _sums(held: Sequence[_Held], plan: Plan) -> Iterator[Copy]:
    """Stacks of gradients, which a layer's are added to or written into."""
    for one in held:
        if not one.is_learnt:
            continue
        if _adds_up(plan):
            size = _summed(one, plan)
            fresh = plan.element_bytes if one.is_matrix and not plan.reduces_in_backward else FLOAT32
            yield Copy(SUMS, 2 * FLOAT32 * size)
            yield Copy(SUMS, (2 * FLOAT32 + fresh) * size)
        else:
            yield Copy(SUMS, 2 * FLOAT32 * _summed(one, plan))


def _sent(held: Sequence[_Held], plan: Plan) -> Iterator[Copy]:
    """Gradients that the backward pass sums over ranks."""
    if not plan.reduces_in_backward or plan.grad_reduce_dtype != "float32":
        return
    for one in held:
        if one.is_learnt and one.is_matrix and one.is_shared:
            yield Copy(SENT, (FLOAT32 + plan.element_bytes) * one.elements)


def _once(one: _Held, plan: Plan, layers: int) -> Iterator[Copy]:
    if _is_gathered_once(one, plan):
        yield from _gathered(one, plan, layers)
    elif plan.unrolled and one.is_matrix:
        yield Copy(CASTS, (FLOAT32 + plan.element_bytes) * one.elements * layers)
    if not one.is_learnt:
        return
    summed = layers * _summed(one, plan)
    yield Copy(SUMS, 2 * FLOAT32 * summed) if plan.unrolled else Copy(ZEROS, FLOAT32 * summed)
    if plan.zero == 1 and one.is_split and not plan.reduces_in_backward:
        yield Copy(PARTS, 2 * FLOAT32 * one.elements, 2 * layers)


def _gathered(one: _Held, plan: Plan, layers: int) -> Iterator[Copy]:
    """Of a parameter that is gathered once: a matrix layer by layer, a vector of all layers."""
    c = plan.element_bytes
    if not one.is_matrix:
        yield Copy(PARTS, 2 * FLOAT32 * one.elements * layers)
        return
    yield Copy(PARTS, (FLOAT32 + c) * one.own, layers)
    yield Copy(PARTS, 2 * c * one.elements, layers)
    if not plan.unrolled:
        yield Copy(ZEROS, c * one.elements * layers)


def _is_gathered_once(one: _Held, plan: Plan) -> bool:
    return plan.gathers_per_step and one.is_split and one.is_learnt


def _adds_up(plan: Plan) -> bool:
    """Whether iterations of the backward loop add their layer's gradients to sums."""
    return plan.microbatches > 1 or plan.is_staged


def _summed(one: _Held, plan: Plan) -> float:
    """Elements of a gradient that a rank keeps while microbatches come."""
    return one.own if plan.zero and plan.reduces_in_backward else one.elements


@cache
def _held(stack: Stack, model: Model, layout: Layout, mesh: MeshShape) -> tuple[_Held, ...]:
    """The parameters of a layer."""

    def one(weight: Weight) -> _Held:
        elements, ways = on_device(weight, layout, mesh), mesh.degree(zero_axes(layout, weight.names))
        own = elements / zero_degree(weight, layout, mesh)
        return _Held(elements, own, gathers_in_compute_dtype(weight.names), is_trainable(model, weight.name), ways > 1)

    return tuple(one(weight) for part in stack.parts for weight in part.weights)
