"""Copies in loops over layers: memory traffic of a compiled scan in addition to that of the model's kernels.

Each factor was read off programs compiled for H100 and H200 (`mtjax inspect`, "memory-bound, by cause"), and none is
fitted. A copy reads and writes every byte, and so counts 2; it takes at least a kernel launch, which is the time of
vectors. c are the bytes of the compute dtype; parameters and accumulated gradients have 4, matrices of master weights
in bfloat16 2.

Not counted: parameters outside the layers, experts' blocks (`mtjax.analysis.expert_blocks`), stage-boundary
activations, transposes of gathered parameters, and vectors that are only read from their stack, mostly inside another
kernel. Full recompute in groups is counted as that of single layers, as in all formulas of time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.counts import on_device, zero_axes, zero_degree
from mtjax.analysis.memory import saved_per_loop
from mtjax.analysis.parts.part import Weight
from mtjax.config import Model
from mtjax.config.adapters import is_trainable
from mtjax.layout.layouts import Layout, gathers_in_compute_dtype
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk, layers_of_stage

SAVED = "saved activations, into stacks and out of them"
ZEROS = "zeros for stacks"
CASTS = "casts of matrices"
SUMS = "accumulated gradients"
SENT = "gradients converted or joined for their reduction"
SHARDS = "ZeRO's shards of stacks"
LAUNCHES = "small kernels of the loop"

FLOAT32 = 4


class Copy(NamedTuple):
    """A number of equal copy kernels."""

    kind: str
    size: float
    """Bytes that one of them reads and writes."""
    times: float = 1
    """Number of kernels."""

    @property
    def total(self) -> float:
        """Bytes of all kernels."""
        return self.times * self.size


@dataclass(frozen=True)
class _Parameter:
    """Elements of a layer's parameter on a device, and how it is used."""

    elements: int
    """Before ZeRO."""
    shard: float
    """After ZeRO."""
    is_matrix: bool
    """Whether matmuls read it in the compute dtype."""
    is_trainable: bool
    is_replicated: bool
    """Whether other ranks hold the same parameter, before ZeRO."""

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO shards it."""
        return self.shard < self.elements

    def bytes_of(self, plan: Plan) -> int:
        """Returns the bytes of a stored element of a matrix."""
        return plan.precision.matrices if self.is_trainable else FLOAT32


def copies(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Returns the copies of a step on a GPU; with pipeline parallelism without those of the bubble."""
    passes = plan.microbatches * (plan.chunks if plan.is_staged else 1)
    found = copies_in_step(anatomy, plan)
    for stack in anatomy.stacks:
        n = passes * layers_in_chunk(stack, plan)
        found += [copy._replace(times=n * copy.times) for copy in copies_in_turn(stack, anatomy.model, plan)]
    return found


def copies_in_turn(stack: StackParts, model: Model, plan: Plan) -> list[Copy]:
    """Returns the copies for one layer and microbatch, forward and backward."""
    parameters = _parameters(stack, model, plan.layout(model), plan.mesh)
    found = list(_sent(parameters, plan))
    if not plan.unrolled:
        found += [*_saved(stack, plan), *_casts(parameters, plan), *_sums(parameters, plan)]
        # A copy of nothing takes a launch.
        found.append(Copy(LAUNCHES, 0, _launches(stack, parameters, plan)))
    return found


def copies_in_step(anatomy: Anatomy, plan: Plan) -> list[Copy]:
    """Returns the copies whose number does not depend on that of microbatches."""
    found: list[Copy] = []
    for stack in anatomy.stacks:
        layers = layers_of_stage(stack, plan)
        for parameter in _parameters(stack, anatomy.model, plan.layout(anatomy.model), plan.mesh):
            found += _once(parameter, plan, layers)
    return found


def _saved(stack: StackParts, plan: Plan) -> Iterator[Copy]:
    """Yields copies of saved activations into stacks and slots, and out of them."""
    layers = layers_in_chunk(stack, plan)
    in_slots = plan.is_staged and plan.recompute != "full"
    for size in saved_per_loop(stack, plan).values():
        # XLA: a scan writes what a layer saves into a stack, whose memory it fills with zeros first, and slices it out
        # for the backward pass. It removes a loop of one layer, such as a stage's chunk of one, which needs no stack.
        if size and layers > 1:
            yield Copy(SAVED, 2 * size / layers, 2)
            yield Copy(ZEROS, size, 1 / layers)
        # Stages keep what a chunk saves until its backward half, in a slot of its microbatch.
        if size and in_slots:
            yield Copy(SAVED, 2 * size, 2 / layers)


def _launches(stack: StackParts, parameters: Sequence[_Parameter], plan: Plan) -> int:
    """Returns the kernels of a layer that take no longer than a launch, besides those that copy."""
    # These are the counters of loops, reads of vectors from their stacks, the last sums of vectors' gradients,
    # statistics of norms, and dropout's keys.
    norms = [weight.name for part in stack.parts for weight in part.weights if "norm." in weight.name]
    matrices = sum(parameter.is_matrix for parameter in parameters)
    vectors, keys = len(parameters) - matrices, 2 if plan.dropout else 0
    reads = min(vectors, 3)  # those of a shape are read by one kernel
    ahead, back = (1, 3) if layers_in_chunk(stack, plan) > 1 else (0, 0)  # the loop's counters
    forward = ahead + reads + keys
    backward = back + reads + vectors + sum(name.endswith("scale") for name in norms)
    if plan.recompute != "full":
        return forward + backward
    # With one microbatch matrices that were copied in float32 are cast before they are read.
    return forward + backward + len(norms) + keys + (0 if _accumulates(plan) else matrices)


def _casts(parameters: Sequence[_Parameter], plan: Plan) -> Iterator[Copy]:
    """Yields the casts of matrices when they are read from their stacks."""
    # Forward and backward, and once more where a stage recomputes its chunk.
    passes = 3 if plan.recompute == "full" and plan.is_staged else 2
    for parameter in parameters:
        if not parameter.is_matrix:
            continue
        each = parameter.bytes_of(plan) + plan.element_bytes
        if _is_gathered_once(parameter, plan):  # cast already
            yield Copy(CASTS, 2 * plan.element_bytes * parameter.elements, passes)
        elif plan.zero == 3 and parameter.is_sharded:
            yield Copy(CASTS, each * parameter.shard, passes)
        elif _accumulates(plan):
            yield Copy(CASTS, each * parameter.elements, passes)
        else:
            # XLA: with one microbatch the backward pass copies matrices as they are, and its matmuls cast them.
            yield Copy(CASTS, each * parameter.elements)
            yield Copy(CASTS, 2 * parameter.bytes_of(plan) * parameter.elements)


def _sums(parameters: Sequence[_Parameter], plan: Plan) -> Iterator[Copy]:
    """Yields the copies of gradients that are added to their stacks, or written into them."""
    for parameter in parameters:
        if not parameter.is_trainable:
            continue
        size = _accumulated(parameter, plan)
        if _accumulates(plan):
            # A gradient that is reduced in the backward pass has been converted to float32 before.
            new = plan.element_bytes if parameter.is_matrix and not plan.reduces_in_backward else FLOAT32
            if plan.is_staged:
                # XLA: the loop over ticks copies the accumulated gradients of a layer before it adds to them.
                yield Copy(SUMS, 2 * FLOAT32 * size)
            # The sum is read with the new gradient, and written.
            yield Copy(SUMS, (2 * FLOAT32 + new) * size)
        else:
            # The first and only gradients are copied into zeros.
            yield Copy(SUMS, 2 * FLOAT32 * size)


def _sent(parameters: Sequence[_Parameter], plan: Plan) -> Iterator[Copy]:
    """Yields the conversions of gradients that the backward pass reduces over ranks in float32, or the copies into one
    array and out of it for an all-reduce."""
    if not plan.reduces_in_backward or plan.grad_reduce_dtype != "float32":
        return
    if plan.zero == 0 and not plan.unrolled:
        reduced = [parameter for parameter in parameters if parameter.is_trainable and parameter.is_replicated]
        if reduced:
            yield Copy(SENT, 2 * FLOAT32 * sum(parameter.elements for parameter in reduced))
        # Into the joint array in one kernel, out of it in one for each parameter.
        yield from (Copy(SENT, 2 * FLOAT32 * parameter.elements) for parameter in reduced)
        return
    for parameter in parameters:
        # The products of unrolled layers compute these gradients in float32 already.
        if plan.unrolled and plan.zero == 3 and parameter.is_sharded:
            continue
        if parameter.is_trainable and parameter.is_matrix and parameter.is_replicated:
            yield Copy(SENT, (FLOAT32 + plan.element_bytes) * parameter.elements)


def _once(parameter: _Parameter, plan: Plan, layers: int) -> Iterator[Copy]:
    """Yields the copies of a stacked parameter and its gradient that a step makes once."""
    if _is_gathered_once(parameter, plan):
        yield from _gathered(parameter, plan, layers)
    elif plan.unrolled and parameter.is_matrix:
        cast = parameter.shard if plan.zero == 3 else parameter.elements
        yield Copy(CASTS, (parameter.bytes_of(plan) + plan.element_bytes) * cast * layers)
    if not parameter.is_trainable:
        return
    # Sums of gradients begin as zeros; unrolled layers have none, and write each layer's gradient into a stack.
    accumulated = layers * _accumulated(parameter, plan)
    yield Copy(SUMS, 2 * FLOAT32 * accumulated) if plan.unrolled else Copy(ZEROS, FLOAT32 * accumulated)
    if plan.zero == 1 and parameter.is_sharded and not plan.reduces_in_backward:
        # Copied out of the stack, and laid out so that each rank's part is in one piece.
        yield Copy(SHARDS, 2 * FLOAT32 * parameter.elements, 2 * layers)


def _gathered(parameter: _Parameter, plan: Plan, layers: int) -> Iterator[Copy]:
    """Yields the copies of a parameter that is all-gathered once a step: a matrix per layer, a vector of all layers."""
    c = plan.element_bytes
    # A rank's shard is cast before it is sent; what arrives is written into the stack of all layers, which the loop
    # fills with zeros first.
    if not parameter.is_matrix:
        yield Copy(SHARDS, 2 * FLOAT32 * parameter.elements * layers)
        return
    yield Copy(SHARDS, (parameter.bytes_of(plan) + c) * parameter.shard, layers)
    yield Copy(SHARDS, 2 * c * parameter.elements, layers)
    if not plan.unrolled:
        yield Copy(ZEROS, c * parameter.elements * layers)


def _is_gathered_once(parameter: _Parameter, plan: Plan) -> bool:
    """Returns whether ZeRO-1 or 2 all-gathers the parameter once a step."""
    return plan.gathers_per_step and parameter.is_sharded and parameter.is_trainable


def _accumulates(plan: Plan) -> bool:
    """Returns whether the backward loop adds a layer's gradients to accumulated ones."""
    return plan.microbatches > 1 or plan.is_staged


def _accumulated(parameter: _Parameter, plan: Plan) -> float:
    """Returns the elements of a parameter's accumulated gradient on a rank."""
    return parameter.shard if plan.zero and plan.reduces_in_backward else parameter.elements


@cache
def _parameters(stack: StackParts, model: Model, layout: Layout, mesh: MeshShape) -> tuple[_Parameter, ...]:
    """Returns the parameters of a layer on a device."""

    def parameter(weight: Weight) -> _Parameter:
        elements, ranks = on_device(weight, layout, mesh), mesh.degree(zero_axes(layout, weight.names))
        shard = elements / zero_degree(weight, layout, mesh)
        is_matrix, trainable = gathers_in_compute_dtype(weight.names), is_trainable(model, weight.name)
        return _Parameter(elements, shard, is_matrix, trainable, ranks > 1)

    return tuple(parameter(weight) for part in stack.parts for weight in part.weights)
