"""What a GPU sends in a step, by mesh axis and purpose, by formula.

Symbols as in `mtjax.plan.formulas`. Collectives per layer: Figure 4 of arXiv 1909.08053 (tensor), section 4.2.2 of
arXiv 2205.05198 (sequence); the data axis: section 7 of arXiv 1910.02054.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mtjax.plan.formulas import Recompute, Shape
from mtjax.plan.memory import stage_parameters
from mtjax.plan.plans import Plan

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "send"]


class Axis(Enum):
    """The mesh axis that a collective crosses."""

    MODEL = "model ways"
    STAGE = "stages"
    DATA = "data ways"


def ring_factor(operation: Operation, ways: int) -> float:
    """Bytes that a GPU sends per byte of the full array.

    All-reduce `2(n-1)/n`; all-gather and reduce-scatter `(n-1)/n`; send 1.
    """
    if ways == 1:
        return 0
    return {"all-reduce": 2 * (ways - 1) / ways, "send": 1.0}.get(operation, (ways - 1) / ways)


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step."""

    axis: Axis
    ways: int
    operation: Operation
    purpose: str
    count: float
    """Per GPU and step."""
    elements: float
    """Of the full array (the gathered side of gather and scatter)."""
    element_bytes: int

    @property
    def size(self) -> float:
        """Bytes of the full array."""
        return self.elements * self.element_bytes

    @property
    def sent(self) -> float:
        """Bytes that a GPU sends in a step, ring factor included."""
        return self.count * self.size * ring_factor(self.operation, self.ways)


def layer_collectives(
    sequence_parallel: bool, recompute: Recompute, *, drops_last_reduction: bool = True
) -> dict[tuple[str, Operation], int]:
    """Collectives of `bsh` elements of one layer and microbatch over the model ways.

    `drops_last_reduction`: the recomputed forward pass leaves out its last reduction, whose result nobody needs (XLA
    does; PyTorch's checkpoint does not).
    """
    full = recompute == "full"
    reductions = (1 if drops_last_reduction else 2) if full else 0
    if not sequence_parallel:
        counts: dict[tuple[str, Operation], int] = {
            ("forward", "all-reduce"): 2,
            ("recomputed forward", "all-reduce"): reductions,
            ("backward", "all-reduce"): 2,
        }
    else:
        counts = {
            ("forward", "all-gather"): 2,
            ("forward", "reduce-scatter"): 2,
            ("recomputed forward", "all-gather"): 2,
            ("recomputed forward", "reduce-scatter"): reductions,
            ("backward", "all-gather"): 2,
            ("backward", "reduce-scatter"): 2,
        }
    return {key: n for key, n in counts.items() if n}


def collectives(shape: Shape, plan: Plan, *, drops_last_reduction: bool = True) -> list[Collective]:
    """Everything a GPU sends in a step; on stages, a GPU of the stage with the layers and both ends' extras."""
    return [
        *_model_axis(shape, plan, drops_last_reduction),
        *_stage_axis(shape, plan),
        *_data_axis(shape, plan),
    ]


def _model_axis(shape: Shape, plan: Plan, drops_last: bool) -> Iterator[Collective]:
    ways, m, c = plan.ways, plan.microbatches, plan.element_bytes
    if ways.model == 1:
        return
    hidden = plan.microbatch_size * shape.sequence_length * shape.hidden_size
    tokens = plan.microbatch_size * shape.sequence_length

    def entry(operation: Operation, purpose: str, count: float, elements: float, size: int = c) -> Collective:
        return Collective(Axis.MODEL, ways.model, operation, purpose, count, elements, size)

    layers = shape.num_layers // ways.stage
    per_layer = layer_collectives(plan.sequence_parallel, plan.recompute, drops_last_reduction=drops_last)
    again, nested = _computed_again(plan, layers)
    for (when, operation), count in per_layer.items():
        number = layers * count
        if when == "recomputed forward" and operation == "all-gather":
            number += nested * count if drops_last else 0
        elif when == "recomputed forward":
            number = again * count + (nested if drops_last else 0)
        yield entry(operation, f"layers, {when}", m * number, hidden)
    if plan.sequence_parallel:
        yield entry("reduce-scatter", "embedding, forward", m, hidden)
        yield entry("all-gather", "embedding, backward", m, hidden)
        yield entry("all-gather", "loss, hidden states", m, hidden)
        yield entry("reduce-scatter", "loss, backward", m, hidden)
    else:
        yield entry("all-reduce", "embedding, forward", m, hidden)
        yield entry("all-reduce", "loss, backward", m, hidden)
    yield entry("all-reduce", "loss, per token", 3 * m, tokens, 4)
    if (shape.num_kv_heads or shape.num_heads) % ways.model:
        shared = 2 * shape.kv_size * (shape.hidden_size + shape.biases)
        yield entry("all-reduce", "gradients of shared key and value heads", m * layers, shared, 4)


def _computed_again(plan: Plan, layers: int) -> tuple[int, int]:
    """Layers of a stage that full recompute computes again, and those of them that share a group with others.

    JAX computes a layer of a group twice again: with its group, up to the last product, and, for its norms, by itself.
    """
    if plan.recompute != "full":
        return layers, 0
    again = layers if plan.recompute_first is None else min(plan.recompute_first, layers)
    return again, again if plan.recompute_group > 1 else 0


def _stage_axis(shape: Shape, plan: Plan) -> Iterator[Collective]:
    ways = plan.ways
    if ways.stage == 1:
        return
    hidden = plan.microbatch_size * shape.sequence_length * shape.hidden_size
    split = ways.model if plan.sequence_parallel else 1
    count = 2 * plan.microbatches * plan.chunks
    purpose = "activations and their gradients"
    yield Collective(Axis.STAGE, ways.stage, "send", purpose, count, hidden / split, plan.element_bytes)


def _data_axis(shape: Shape, plan: Plan) -> Iterator[Collective]:
    ways, precision = plan.ways, plan.precision
    if ways.data == 1:
        return
    parameters = max(stage_parameters(shape, plan, i) for i in range(ways.stage))

    def entry(operation: Operation, purpose: str, count: float, element_bytes: int) -> Collective:
        return Collective(Axis.DATA, ways.data, operation, purpose, count, parameters, element_bytes)

    if plan.zero == 0:
        yield entry("all-reduce", "gradients", 1, precision.reduced)
        return
    each = plan.microbatches if plan.zero >= 2 else 1
    yield entry("reduce-scatter", "gradients", each, precision.reduced)
    if plan.zero == 3:
        each = plan.microbatches * (3 if _computed_again(plan, 1)[1] else 2)
        yield entry("all-gather", "parameters, forward and backward", each, plan.element_bytes)
    else:
        yield entry("all-gather", "updated parameters", 1, precision.gathered)


def sent_by_axis(entries: list[Collective]) -> dict[Axis, float]:
    """Bytes that a GPU sends in a step over each axis that is used."""
    axes = dict.fromkeys(entry.axis for entry in entries)
    return {axis: sum(e.sent for e in entries if e.axis is axis) for axis in axes}


def bandwidth_demand(sent: float, compute_seconds: float, exposed_share: float) -> float:
    """Bytes per second that keep communication under `exposed_share` of the compute time it serves."""
    return sent / (compute_seconds * exposed_share)
