"""How many parameters a model has, and how many of each kind a device holds and sends."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from mtjax.config import Model
from mtjax.config.sizes import output_is_tied
from mtjax.theory.adapters import is_trainable
from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.layout import (
    LAYERS,
    NOT_SHARDED,
    ZERO_AXES,
    Layout,
    gathers_in_compute_dtype,
    is_matrix,
    sharded_dimension,
)
from mtjax.theory.mesh import MeshShape
from mtjax.theory.parts.part import Weight
from mtjax.theory.plan import Plan
from mtjax.theory.rules import Axes
from mtjax.theory.stages import layers_in_chunk

EXPERT_NAME = "expert"
"""Logical name of the dimension along which experts' matrices are stacked."""


def parameters(anatomy: Anatomy) -> int:
    """All parameters: `12lh^2 (1 + 13/(12h) + (V+s)/(12lh)) + 2h` of GPT-2 (arXiv 2104.04473, equation 2)."""
    return sum(weight.size for weight in anatomy.weights)


def active_parameters(anatomy: Anatomy) -> int:
    """Parameters that a token meets: all, but of experts' matrices only those of the experts that it goes to."""
    return round(sum(weight.size * met_share(anatomy.model, weight) for weight in anatomy.weights))


def met_share(model: Model, weight: Weight, tokens: int = 1) -> float:
    """The share of a parameter that so many tokens meet: of experts', if each token's are any of them by chance."""
    if EXPERT_NAME not in weight.names:
        return 1.0
    return 1 - (1 - model.experts_top_k / model.num_experts) ** tokens


def megatron_parameters(anatomy: Anatomy) -> int:
    """Parameters as Megatron-LM's `theoretical_memory_usage` counts them: no linear biases, no position table."""

    def counts(weight: Weight) -> bool:
        return weight.name != "positions" and ("norm" in weight.name or is_matrix(weight.names))

    return sum(weight.size for weight in anatomy.weights if counts(weight))


def on_device(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Elements of a parameter that one rank of a model-parallel group holds, before ZeRO splits any."""
    return weight.size // math.prod(mesh.degree(layout.rules.axes(name)) for name in weight.names)


@dataclass(frozen=True)
class Counts:
    """Elements on one model rank, before `data` splits any."""

    all: int = 0
    replicated: int = 0
    """Those not divisible by the data ways, so that ZeRO leaves them unsplit."""
    layer_matrices: int = 0
    """Of those that ZeRO splits, matrices of the layers, which it gathers in the compute type; so the next three."""
    layer_vectors: int = 0
    """Biases and norms of the layers."""
    outside_matrices: int = 0
    """Matrices outside the layers, such as embeddings."""
    outside_vectors: int = 0
    """Biases and norms outside the layers."""
    in_layers: int = 0
    """Of all, those of the layers."""
    replicated_in_layers: int = 0
    """Of the unsplit ones, those of the layers."""
    experts: int = 0
    """Of all, experts' matrices, of which ranks over `expert` have their own."""
    replicated_experts: int = 0
    """Of the unsplit ones, experts' matrices."""
    expert_matrices: int = 0
    """Of those that ZeRO splits, experts' matrices; these are not among the layers' here."""
    transposed: int = 0
    """Of the parts that ZeRO-3 leaves, what XLA turns round before it is gathered: parameters that are split along
    another dimension than the outermost of a layer."""

    @property
    def shared(self) -> "Counts":
        """Without experts' matrices."""
        return replace(
            self,
            all=self.all - self.experts,
            replicated=self.replicated - self.replicated_experts,
            in_layers=self.in_layers - self.experts,
            replicated_in_layers=self.replicated_in_layers - self.replicated_experts,
            experts=0,
            replicated_experts=0,
            expert_matrices=0,
        )


def counts(weights: Iterable[Weight], layout: Layout, mesh: MeshShape) -> Counts:
    """The elements of some parameters by what ZeRO does with them."""
    return _counts(tuple(weights), layout, mesh)


@cache
def _counts(weights: tuple[Weight, ...], layout: Layout, mesh: MeshShape) -> Counts:
    sums = dict.fromkeys(Counts.__dataclass_fields__, 0)
    for weight in weights:
        elements, stacked = on_device(weight, layout, mesh), weight.names[0] == LAYERS
        is_expert = EXPERT_NAME in weight.names
        sums["all"] += elements
        sums["in_layers"] += elements if stacked else 0
        sums["experts"] += elements if is_expert else 0
        if layout.zero and zero_degree(weight, layout, mesh) == 1:
            sums["replicated"] += elements
            sums["replicated_in_layers"] += elements if stacked else 0
            sums["replicated_experts"] += elements if is_expert else 0
        elif layout.zero:
            place = "expert" if is_expert else "layer" if stacked else "outside"
            sums[f"{place}_{'matrices' if gathers_in_compute_dtype(weight.names) else 'vectors'}"] += elements
            sums["transposed"] += _turned(weight, layout, mesh) if layout.zero == 3 else 0
    return Counts(**sums)


def zero_axes(layout: Layout, names: tuple[str, ...]) -> Axes:
    """The mesh axes over which ZeRO splits a parameter: those whose ranks would have the same."""
    return tuple(axis for axis in layout.rules.replicas(names) if axis in ZERO_AXES)


def zero_degree(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Into how many parts ZeRO splits a parameter; 1 where it does not."""
    ways = mesh.degree(zero_axes(layout, weight.names))
    return 1 if sharded_dimension(weight.names, weight.shape, layout, ways) == NOT_SHARDED else ways


def _turned(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Elements of a rank's part of a parameter if dimensions of a layer come before the one that ZeRO splits."""
    ways = mesh.degree(zero_axes(layout, weight.names))
    dim = sharded_dimension(weight.names, weight.shape, layout, ways)
    sizes = [n // mesh.degree(layout.rules.axes(name)) for name, n in zip(weight.names, weight.shape, strict=True)]
    outer = sizes[weight.names[0] == LAYERS : dim]
    return math.prod(sizes) // ways if math.prod(outer) > 1 else 0


def stage_weights(anatomy: Anatomy, plan: Plan, stage: int = 0) -> list[Weight]:
    """The parameters that a stage has a part of: its share of every stack, and what is outside them.

    In mtjax every stage holds all that is outside, and as many places for layers as the stage with most: one program
    runs on all. In Megatron embeddings are on the first and heads on the last, and a tied table is on both ends.
    """
    stages = plan.mesh.stage
    if stages == 1:
        return anatomy.weights
    stacked = []
    for stack in anatomy.stacks:
        layers = stages * layers_in_chunk(stack, plan) * (plan.chunks if plan.is_staged else 1)
        stacked += [Weight(w.name, w.names, (layers, *w.shape[1:])) for w in stack.weights]
    first = [w for part in anatomy.embed for w in part.weights]
    last = [w for part in anatomy.head for w in part.weights]
    if plan.is_staged:
        return [*stacked, *first, *last]
    tied = anatomy.embed[0].weights if output_is_tied(anatomy.model) else []
    ends = {0: first, stages - 1: [*last, *tied]}
    return [*stacked, *ends.get(stage, [])]


def stage_counts(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Counts:
    """The elements that a device of a stage holds."""
    alike = Plan(
        plan.mesh, 1, 1, chunks=plan.chunks, layers_per_stage=plan.layers_per_stage, residuals=plan.residuals
    )  # all that weights depend on, so that plans which differ in the rest share an entry of the cache
    return _stage_counts(anatomy, plan.layout(anatomy.model), alike, stage)


@cache
def _stage_counts(anatomy: Anatomy, layout: Layout, plan: Plan, stage: int) -> Counts:
    return counts(stage_weights(anatomy, plan, stage), layout, plan.mesh)


def trainable_counts(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Counts:
    """Those of them that are trained: all, or adapters and a task's head."""
    if not anatomy.model.lora_rank:
        return stage_counts(anatomy, plan, stage)
    weights = [w for w in stage_weights(anatomy, plan, stage) if is_trainable(anatomy.model, w.name)]
    return counts(weights, plan.layout(anatomy.model), plan.mesh)


@cache
def layer_counts(stack: Stack, layout: Layout, mesh: MeshShape) -> Counts:
    """The elements that a device holds of one layer of a stack."""
    return counts([weight for part in stack.parts for weight in part.weights], layout, mesh)


def largest_part(anatomy: Anatomy, stack: Stack, layout: Layout, mesh: MeshShape) -> int:
    """Elements that a device holds of what is trained of the part of a layer that has most."""
    learnt = [[w for w in part.weights if is_trainable(anatomy.model, w.name)] for part in stack.parts]
    return max(counts(weights, layout, mesh).all for weights in learnt)


def largest_stack(anatomy: Anatomy, plan: Plan) -> int:
    """Elements that a device holds of the trained parameter of the layers that has most, before ZeRO splits it."""
    layout, weights = plan.layout(anatomy.model), stage_weights(anatomy, plan)
    learnt = (w for w in weights if w.names[0] == LAYERS and is_trainable(anatomy.model, w.name))
    return max(on_device(weight, layout, plan.mesh) for weight in learnt)


def peak_stage_counts(anatomy: Anatomy, plan: Plan) -> Counts:
    """Those of the stage that holds most."""
    ends = {0} if plan.is_staged else {0, plan.mesh.stage - 1}
    return max((stage_counts(anatomy, plan, stage) for stage in ends), key=lambda c: c.all)


def rank_parameters(anatomy: Anatomy, model_ways: int) -> int:
    """Parameters that one rank of a tensor-parallel group holds, without stages (section 3 of arXiv 1909.08053)."""
    return stage_counts(anatomy, Plan(MeshShape(model=model_ways), 1, 1)).all
