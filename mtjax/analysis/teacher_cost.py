"""Cost of a teacher on the mesh of its student, by formula: its memory, and its forward pass before each step.

The teacher is sharded as a model of its shape is, with matrices in the compute dtype, and runs microbatch by
microbatch. The student's step computes losses from its final hidden states, or, of a task, from its outputs
(docs/finetune.md, "Distillation").
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.counts import on_device, stage_weights, zero_degree
from mtjax.analysis.flops import computed_over, forward_flops, logit_flops
from mtjax.analysis.parts.heads import teacher_table
from mtjax.analysis.parts.part import Weight
from mtjax.config.sizes import num_outputs
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.layout.plan import Plan


class TeacherCost(NamedTuple):
    """The teacher of a plan."""

    anatomy: Anatomy
    plan: Plan
    """The teacher's plan, of forward passes only."""


def teacher_of(plan: Plan) -> TeacherCost | None:
    """Returns the teacher of a plan; None without one, or where its model is not known."""
    if plan.teacher is None:
        return None
    return TeacherCost(anatomy_of(plan.teacher), plan.forward_only)


def weight_bytes(plan: Plan) -> float:
    """Returns the bytes of the teacher's parameters on a GPU: matrices in the compute dtype, norms and biases in
    float32."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    p = teacher.plan
    # Only the settings that weights depend on, so that plans which differ in others share an entry of the cache.
    key = Plan(p.mesh, 1, 1, sequence_parallel=p.sequence_parallel, zero=p.zero, chunks=p.chunks)
    return _weight_bytes(teacher.anatomy, replace(key, element_bytes=p.element_bytes))


@cache
def _weight_bytes(anatomy: Anatomy, plan: Plan) -> float:
    return sum(_bytes(anatomy, weight, plan) for weight in stage_weights(anatomy, plan))


def _bytes(anatomy: Anatomy, weight: Weight, plan: Plan) -> float:
    """Returns the bytes of a parameter on a GPU; ZeRO-3 shards it."""
    layout = plan.layout(anatomy.model)
    size = on_device(weight, layout, plan.mesh) * (plan.element_bytes if gathers_in_compute_dtype(weight.names) else 4)
    return size / zero_degree(weight, layout, plan.mesh) if plan.zero == 3 else size


def table_bytes(anatomy: Anatomy, plan: Plan, *, gathered: bool = False) -> float:
    """Returns the bytes of the teacher's output table on a GPU, which the student's step reads; 0 for a task.

    Args:
      anatomy: the student's.
      plan: the student's.
      gathered: count only the copy that ZeRO-3 all-gathers for the step, not the GPU's shard.
    """
    if not plan.teacher_width:
        return 0.0
    table = teacher_table(anatomy.model, plan.teacher_width)
    shard, full = (_bytes(anatomy, table, replace(plan, zero=zero)) for zero in (plan.zero, 0))
    return full if gathered and shard < full else 0.0 if gathered else shard


def output_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes on a GPU of the teacher's outputs for a batch: hidden states in the compute dtype, or of a task
    float32 outputs."""
    model, samples = anatomy.model, plan.global_batch_size / plan.data_degree
    if plan.teacher_width:
        return plan.element_bytes * samples * model.sequence_length / plan.mesh.context * plan.teacher_width
    if plan.teacher is None:
        return 0.0
    return 4 * samples * (2 * model.sequence_length if model.head == "spans" else num_outputs(model))


def forward_bytes(plan: Plan) -> float:
    """Returns the bytes on a GPU of the teacher's forward pass, without its weights and outputs."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    (stack, *_), p = teacher.anatomy.stacks, teacher.plan
    shards = p.mesh.model if p.sequence_parallel else 1
    tokens = p.global_batch_size / p.data_degree * stack.tokens / p.mesh.context
    # Those of all microbatches are held for the last norm; stages have them twice and in float32.
    hidden_states = tokens * stack.hidden / shards * (8 if p.is_staged else p.element_bytes)
    # A layer's input, its output and its norm's input, and the activations of its larger sublayer.
    workspace = 3 * p.element_bytes * p.local_tokens(stack.tokens) * stack.hidden
    workspace += max(sum(part.saved_bytes(p).values()) for part in stack.parts)
    gathered = 0.0
    if p.zero == 3:
        layer = [weight for part in stack.parts for weight in part.weights]
        # The layer's, and those prefetched for the next.
        gathered = 2 * sum(_bytes(teacher.anatomy, weight, replace(p, zero=0)) for weight in layer)
    return hidden_states + workspace + gathered


def teacher_flops(plan: Plan) -> float:
    """Returns the FLOPs of the teacher's forward pass, for a sample; without logits of tokens, which the step
    computes."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    anatomy = computed_over(teacher.anatomy, plan.mesh)
    return forward_flops(anatomy) - (logit_flops(anatomy) if anatomy.model.head == "language" else 0.0)
