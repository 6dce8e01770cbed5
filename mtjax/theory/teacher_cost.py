"""A teacher on the mesh of its student, by formula: what it holds, and its forward pass of a batch before each step.

The teacher is split as a model of its shape is, with matrices in the compute type, and runs microbatch by microbatch.
Of its final hidden states - or, of a task, its outputs - the step makes losses (docs/finetune.md, "Distillation").
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from mtjax.config.sizes import num_outputs
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.counts import on_device, stage_weights, zero_degree
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.flops import computed_over, forward_flops, logit_flops
from mtjax.theory.layout import gathers_in_compute_dtype
from mtjax.theory.parts.heads import teacher_table
from mtjax.theory.parts.part import Weight
from mtjax.theory.plan import Plan


class Teacher(NamedTuple):
    """A teacher that a plan knows."""

    anatomy: Anatomy
    plan: Plan
    """Its own: forward alone."""


def teacher_of(plan: Plan) -> Teacher | None:
    """The teacher of a plan; None without one, or where nobody has said which model it is."""
    if plan.teacher is None:
        return None
    own = replace(
        plan,
        teacher=None,
        teacher_width=0,
        layers_per_stage=None,
        label_smoothing=False,
        recompute="none",
        recompute_group=1,
        recompute_first=None,
        recompute_offload=False,
        unrolled=False,
        dropout=False,
        attention_dropout=False,
        adapter_dropout=False,
    )
    return Teacher(anatomy_of(plan.teacher), own)


def weight_bytes(plan: Plan) -> float:
    """Bytes of the teacher's parameters on a GPU: matrices in the compute type, norms and biases in float32."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    p = teacher.plan  # what weights depend on: plans that differ in the rest share an entry of the cache
    alike = Plan(p.mesh, 1, 1, sequence_parallel=p.sequence_parallel, zero=p.zero, chunks=p.chunks)
    return _weight_bytes(teacher.anatomy, replace(alike, element_bytes=p.element_bytes))


@cache
def _weight_bytes(anatomy: Anatomy, plan: Plan) -> float:
    return sum(_bytes(anatomy, weight, plan) for weight in stage_weights(anatomy, plan))


def _bytes(anatomy: Anatomy, weight: Weight, plan: Plan) -> float:
    layout = plan.layout(anatomy.model)
    size = on_device(weight, layout, plan.mesh) * (plan.element_bytes if gathers_in_compute_dtype(weight.names) else 4)
    return size / zero_degree(weight, layout, plan.mesh) if plan.zero == 3 else size


def table_bytes(anatomy: Anatomy, plan: Plan, *, gathered: bool = False) -> float:
    """Bytes of the teacher's output table on a GPU, which the student's step reads; 0 where a task is learnt.

    Args:
      anatomy: the student's.
      plan: the student's.
      gathered: of what ZeRO-3 gathers for the step, beside the GPU's own part.
    """
    if not plan.teacher_width:
        return 0.0
    table = teacher_table(anatomy.model, plan.teacher_width)
    own, whole = (_bytes(anatomy, table, replace(plan, zero=zero)) for zero in (plan.zero, 0))
    return whole if gathered and own < whole else 0.0 if gathered else own


def said_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Bytes on a GPU of what the teacher says of a batch: hidden states in the compute type, or outputs in float32."""
    model, samples = anatomy.model, plan.global_batch_size / plan.data_degree
    if plan.teacher_width:
        return plan.element_bytes * samples * model.sequence_length / plan.mesh.context * plan.teacher_width
    if plan.teacher is None:
        return 0.0
    return 4 * samples * (2 * model.sequence_length if model.head == "spans" else num_outputs(model))


def forward_bytes(plan: Plan) -> float:
    """Bytes on a GPU that the teacher's forward pass needs beside its weights and what it says.

    The residual streams of all microbatches wait for the last norm, on stages twice and in float32. A layer at work has
    its stream before and after it and what its norm reads, what its fuller half makes, and what ZeRO-3 gathers for it
    and for the next.
    """
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    (stack, *_), p = teacher.anatomy.stacks, teacher.plan
    split = p.mesh.model if p.sequence_parallel else 1
    tokens = p.global_batch_size / p.data_degree * stack.tokens / p.mesh.context
    streams = tokens * stack.hidden / split * (8 if p.is_staged else p.element_bytes)
    at_work = 3 * p.element_bytes * p.local_tokens(stack.tokens) * stack.hidden
    at_work += max(sum(part.saved_bytes(p).values()) for part in stack.parts)
    gathered = 0.0
    if p.zero == 3:
        layer = [weight for part in stack.parts for weight in part.weights]
        gathered = 2 * sum(_bytes(teacher.anatomy, weight, replace(p, zero=0)) for weight in layer)
    return streams + at_work + gathered


def teacher_flops(plan: Plan) -> float:
    """FLOPs of the teacher's forward pass, for a sample: where it predicts tokens, without logits, which are made in
    the step."""
    teacher = teacher_of(plan)
    if teacher is None:
        return 0.0
    anatomy = computed_over(teacher.anatomy, plan.mesh)
    return forward_flops(anatomy) - (logit_flops(anatomy) if anatomy.model.head == "language" else 0.0)
