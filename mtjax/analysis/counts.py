"""Numbers of parameters: of a model, and by kind on a device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.parts.part import Weight
from mtjax.config import Model
from mtjax.config.adapters import is_trainable, trains_all
from mtjax.config.sizes import output_is_tied
from mtjax.layout.layouts import (
    LAYERS,
    NOT_SHARDED,
    Layout,
    gathers_in_compute_dtype,
    is_matrix,
    sharded_dimension,
)
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.rules import Axes
from mtjax.layout.stages import layers_of_stage

EXPERT_NAME = "expert"
"""Logical name of the dimension along which experts' matrices are stacked."""


def parameters(anatomy: Anatomy) -> int:
    """Returns all parameters: `12lh^2 (1 + 13/(12h) + (V+s)/(12lh)) + 2h` in GPT-2 (arXiv 2104.04473, equation 2)."""
    return sum(weight.size for weight in anatomy.weights)


def active_parameters(anatomy: Anatomy) -> int:
    """Returns the parameters that are active per token: those of its top k experts, and all outside the experts."""
    return round(sum(weight.size * active_share(anatomy.model, weight) for weight in anatomy.weights))


def active_share(model: Model, weight: Weight) -> float:
    """Returns the share of a parameter that a token uses, if all choices of experts are equally likely: below 1 in
    experts' parameters only."""
    return model.experts_top_k / model.num_experts if EXPERT_NAME in weight.names else 1.0


def megatron_parameters(anatomy: Anatomy) -> int:
    """Returns the parameters as Megatron-LM's `theoretical_memory_usage` counts them: no linear biases or positions."""

    def counts(weight: Weight) -> bool:
        return weight.name != "positions" and ("norm" in weight.name or is_matrix(weight.names))

    return sum(weight.size for weight in anatomy.weights if counts(weight))


def on_device(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Returns the elements of a parameter on one device, before ZeRO shards it."""
    return weight.size // math.prod(mesh.degree(layout.rules.axes(name)) for name in weight.names)


@dataclass(frozen=True)
class Counts:
    """Elements of parameters on one device, before ZeRO shards them."""

    all: int = 0
    replicated: int = 0
    """Those that ZeRO does not shard: without a dimension that is divisible by its degree."""
    layer_matrices: int = 0
    """Of those that ZeRO shards, matrices of the layers, which it all-gathers in the compute dtype; the next three
    fields are also of those that it shards."""
    layer_vectors: int = 0
    """Biases and norms of the layers."""
    outside_matrices: int = 0
    """Matrices outside the layers, such as embeddings."""
    outside_vectors: int = 0
    """Biases and norms outside the layers."""
    in_layers: int = 0
    """Of all, those of the layers."""
    replicated_in_layers: int = 0
    """Of `replicated`, those of the layers."""
    experts: int = 0
    """Of all, experts' matrices and biases that `expert` shards."""
    replicated_experts: int = 0
    """Of `replicated`, those that `expert` shards."""
    outside_experts: int = 0
    """Of `experts`, those outside the stacks."""
    replicated_outside_experts: int = 0
    """Of `replicated_experts`, those outside the stacks."""
    expert_matrices: int = 0
    """Of those that ZeRO shards, experts' matrices; they are not in `layer_matrices`."""
    expert_vectors: int = 0
    """Of those that ZeRO shards, experts' biases that `expert` shards; they are not in `layer_vectors`."""
    transposed: int = 0
    """Of ZeRO-3's shards, those that XLA transposes before the all-gather: of parameters outside the stacks that are
    sharded along another dimension than the outermost. Of a layer's, one layer is transposed at a time."""

    @cached_property
    def shared(self) -> "Counts":
        """The counts without experts' parameters."""
        return replace(
            self,
            all=self.all - self.experts,
            replicated=self.replicated - self.replicated_experts,
            in_layers=self.in_layers - self.experts + self.outside_experts,
            replicated_in_layers=self.replicated_in_layers - self.replicated_experts + self.replicated_outside_experts,
            experts=0,
            replicated_experts=0,
            outside_experts=0,
            replicated_outside_experts=0,
            expert_matrices=0,
            expert_vectors=0,
        )


def counts(weights: Iterable[Weight], layout: Layout, mesh: MeshShape) -> Counts:
    """Counts the elements of parameters by kind and by whether ZeRO shards them."""
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
        sums["outside_experts"] += elements if is_expert and not stacked else 0
        if layout.zero and zero_degree(weight, layout, mesh) == 1:
            sums["replicated"] += elements
            sums["replicated_in_layers"] += elements if stacked else 0
            sums["replicated_experts"] += elements if is_expert else 0
            sums["replicated_outside_experts"] += elements if is_expert and not stacked else 0
        elif layout.zero:
            # Expert parallel ranks hold different experts, so that these are gathered and reduced over other axes than
            # the rest of a layer.
            owner = "expert" if is_expert else "layer" if stacked else "outside"
            sums[f"{owner}_{'matrices' if gathers_in_compute_dtype(weight.names) else 'vectors'}"] += elements
            sums["transposed"] += _transposed(weight, layout, mesh) if layout.zero == 3 and not stacked else 0
    return Counts(**sums)


def zero_axes(layout: Layout, names: tuple[str, ...]) -> Axes:
    """Returns the mesh axes over which ZeRO shards a parameter: those over which it is replicated otherwise."""
    return tuple(axis for axis in layout.rules.replicas(names) if axis in layout.zero_axes)


def zero_degree(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Returns the number of shards into which ZeRO divides a parameter; 1 where it does not."""
    degree = mesh.degree(zero_axes(layout, weight.names))
    return 1 if sharded_dimension(weight.names, weight.shape, layout, mesh, degree) == NOT_SHARDED else degree


def _transposed(weight: Weight, layout: Layout, mesh: MeshShape) -> int:
    """Returns the elements of a rank's ZeRO shard if the sharded dimension is not the outermost, else 0."""
    degree = mesh.degree(zero_axes(layout, weight.names))
    dim = sharded_dimension(weight.names, weight.shape, layout, mesh, degree)
    sizes = [n // mesh.degree(layout.rules.axes(name)) for name, n in zip(weight.names, weight.shape, strict=True)]
    return math.prod(sizes) // degree if math.prod(sizes[:dim]) > 1 else 0


def stage_weights(anatomy: Anatomy, plan: Plan, stage: int = 0) -> tuple[Weight, ...]:
    """Returns the parameters of which a pipeline stage holds a shard: its layers, and those outside the stacks.

    In mtjax every stage holds all parameters outside the stacks, and as many layer slots as the stage with most layers,
    because all run one program. In Megatron embeddings are on the first stage and heads on the last, a tied table on
    both.
    """
    return _stage_weights(anatomy, plan.shards, stage)


@cache
def _stage_weights(anatomy: Anatomy, plan: Plan, stage: int) -> tuple[Weight, ...]:
    stages = plan.mesh.stage
    if stages == 1:
        return anatomy.weights
    stacked = []
    for stack in anatomy.stacks:
        layers = stages * layers_of_stage(stack, plan)
        stacked += [Weight(w.name, w.names, (layers, *w.shape[1:])) for w in stack.weights]
    first = [w for part in anatomy.embed for w in part.weights]
    last = [w for part in anatomy.head for w in part.weights]
    last += anatomy.predictors.weights if anatomy.predictors else ()
    if plan.is_staged:
        return (*stacked, *first, *last)
    tied = anatomy.embed[0].weights if output_is_tied(anatomy.model) else []
    ends = {0: first, stages - 1: [*last, *tied]}
    return (*stacked, *ends.get(stage, []))


def stage_counts(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Counts:
    """Counts the elements of parameters on a device of a stage."""
    return _stage_counts(anatomy, plan.shards, stage)


@cache
def _stage_counts(anatomy: Anatomy, plan: Plan, stage: int) -> Counts:
    return counts(stage_weights(anatomy, plan, stage), plan.layout(anatomy.model), plan.mesh)


def trainable_counts(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Counts:
    """Counts the elements of trainable parameters on a device of a stage: all, LoRA adapters and a task's head, or what
    is not frozen of a Retro."""
    return _trainable_counts(anatomy, plan.shards, stage)


@cache
def _trainable_counts(anatomy: Anatomy, plan: Plan, stage: int) -> Counts:
    if trains_all(anatomy.model):
        return stage_counts(anatomy, plan, stage)
    weights = [w for w in stage_weights(anatomy, plan, stage) if is_trainable(anatomy.model, w.name)]
    return counts(weights, plan.layout(anatomy.model), plan.mesh)


@cache
def layer_counts(stack: StackParts, layout: Layout, mesh: MeshShape) -> Counts:
    """Counts the elements of one layer of a stack on a device."""
    return counts([weight for part in stack.parts for weight in part.weights], layout, mesh)


def largest_part(anatomy: Anatomy, stack: StackParts, plan: Plan) -> int:
    """Returns the trainable elements on a device of the largest component of a layer."""
    return _largest_part(anatomy, stack, plan.shards)


@cache
def _largest_part(anatomy: Anatomy, stack: StackParts, plan: Plan) -> int:
    layout = plan.layout(anatomy.model)
    trainable = [[w for w in part.weights if is_trainable(anatomy.model, w.name)] for part in stack.parts]
    return max(counts(weights, layout, plan.mesh).all for weights in trainable)


def largest_stack(anatomy: Anatomy, plan: Plan) -> int:
    """Returns the elements on a device of the layers' largest stacked trainable parameter, before ZeRO shards it."""
    layout, weights = plan.layout(anatomy.model), stage_weights(anatomy, plan)
    trainable = (w for w in weights if w.names[0] == LAYERS and is_trainable(anatomy.model, w.name))
    return max(on_device(weight, layout, plan.mesh) for weight in trainable)


def peak_stage_counts(anatomy: Anatomy, plan: Plan) -> Counts:
    """Counts the elements of parameters on a device of the stage that holds most."""
    # Megatron's first stage has the embedding and the last the head; those between have less than both.
    ends = {0} if plan.is_staged else {0, plan.mesh.stage - 1}
    return max((stage_counts(anatomy, plan, stage) for stage in ends), key=lambda c: c.all)
