"""What a teacher holds and computes, by formula, against the teacher on a mesh."""

import dataclasses
import math

import jax
import pytest

from mtjax import config
from mtjax.analysis import teacher_cost as teaching
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.memory import stage_memory
from mtjax.convert.saved_model import without_training
from mtjax.finetune.teacher import TeacherTargets
from mtjax.inspect.hlo import parse
from mtjax.inspect.products import count_flops
from mtjax.layout.plan import Plan
from mtjax.models.sharded_model import ShardedModel
from mtjax.models.teacher import TEACHER, TEACHER_TABLE
from tests.tiny import program_of

SETTINGS = {
    "family": "llama",
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_kv_heads": 4,
    "microbatch_size": 2,
    "teacher": "a test",
}


SHAPE = {"sequence_length": 128, "vocab_size": 2000, "tie_embeddings": False}
SIZES = {"num_layers": 4, "hidden_size": 256, "mlp_size": 704, "teacher": None, "teacher_width": None}


def student_and_teacher(mesh, **fields):
    student = program_of(mesh, **SETTINGS, **SHAPE, **fields, teacher_width=256)
    theirs = config.replace(student.config, **SIZES)
    return student, ShardedModel(without_training(theirs, student.config.parallel), student.mesh)


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [("2x2", {}), ("2x4", {"zero": 3, "sequence_parallel": True, "compute_dtype": "bfloat16"}), ("2x2x2", {})],
)
def test_a_teacher_lies_on_a_mesh_as_planned(mesh, fields):
    student, placed = student_and_teacher(mesh, **fields)
    c = 2 if fields.get("compute_dtype") else 4
    held = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * (4 if "norm" in record.name else c)
        for leaf, record in zip(jax.tree.leaves(placed.restore_target), jax.tree.leaves(placed.records), strict=True)
    )
    plan = Plan.of(student.config, student.mesh_shape, teacher=placed.config.model)
    assert teaching.weight_bytes(plan) == held
    anatomy = anatomy_of(student.config.model)
    memory, step = (stage_memory(anatomy, dataclasses.replace(plan, teacher=t)) for t in (plan.teacher, None))
    assert memory.total == pytest.approx(step.total + held - teaching.table_bytes(anatomy, plan))
    given = student.abstract_step_batch()
    said, table = (math.prod(given[n].sharding.shard_shape(given[n].shape)) * c for n in (TEACHER, TEACHER_TABLE))
    assert (teaching.output_bytes(anatomy, plan), teaching.table_bytes(anatomy, plan)) == (said, table)


@pytest.mark.long
def test_a_teacher_s_forward_pass_is_as_planned():
    student, placed = student_and_teacher("2x2")
    places = jax.tree.map(lambda leaf: leaf.sharding, placed.restore_target)
    drawn = placed.on_mesh(jax.jit(placed.draw, out_shardings=places), jax.random.key(0))
    lessons = TeacherTargets(student, placed, drawn)
    batch = {name: array for name, array in student.abstract_batch().items() if name != "sample_index"}
    compiled = placed.on_mesh(lessons._compiled.lower, lessons.parameters, batch).compile()
    text, stats = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and stats is not None

    plan = Plan.of(student.config, student.mesh_shape, teacher=placed.config.model)
    flops = student.config.training.global_batch_size * teaching.teacher_flops(plan)
    assert count_flops(parse(text)) * student.mesh_shape.size == pytest.approx(flops, rel=1e-9)
    memory = stage_memory(anatomy_of(student.config.model), plan)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(lessons.parameters))
    whole = held + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert memory.teacher + memory.teaching == pytest.approx(whole, rel=0.05)
