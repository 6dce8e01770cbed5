"""Meshes as typed, plans from configs, and divisions that leave a rest."""

import dataclasses

import pytest

from mtjax import config
from mtjax.analysis.anatomy import gpt
from mtjax.errors import UserError
from mtjax.layout.divisibility import check
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan

GPT_8B = gpt(72, 3072, 32, 1024, 51_200)


def test_the_plan_of_a_config():
    run = config.load("gpt2-8.3b")
    plan = Plan.of(run, parse_mesh(run.parallel.mesh))
    assert (plan.microbatch_size, plan.microbatches, plan.recompute, plan.element_bytes) == (8, 1, "full", 2)
    assert plan.dropout and not plan.flash_attention
    without = config.replace(run, attention_dropout=0.0)
    assert Plan.of(without, parse_mesh("64x1x8")).flash_attention
    assert not Plan.of(config.replace(without, attention="xla"), parse_mesh("64x1x8")).flash_attention
    staged = Plan.of(config.replace(run, pipeline_schedule="interleaved", chunks=3), parse_mesh("8x8x8"))
    assert (staged.pipeline_schedule, staged.chunks, staged.layers_per_stage) == ("interleaved", 3, None)
    unequal = config.replace(run, layers_per_stage=(17, 19, 19, 17))
    assert Plan.of(unequal, parse_mesh("8x4x8")).layers_per_stage == (17, 19, 19, 17)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mesh": parse_mesh("1x1x3")},
            "num_heads 32 is not divisible by the tensor parallel degree 3 .*; use 24 or 48 heads, .*: 2 and 4",
        ),
        (
            {"mesh": parse_mesh("1x5x1")},
            "num_layers 72 is not divisible by 5 stages; .* 70 and 75 layers, or 4 and 6 stages",
        ),
        (
            {"mesh": parse_mesh("7x1x1")},
            "global_batch_size 512 is not divisible by the data parallel degree 7; .* 511 and 518",
        ),
        ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
        ({"chunks": 2}, "chunks 2 needs pipeline parallelism"),
        (
            {"mesh": parse_mesh("1x3x1"), "pipeline_schedule": "interleaved", "chunks": 2, "global_batch_size": 4}
            | {"residuals": "megatron"},
            "a multiple of 3 stages, and there are 4; the nearest that are: 3 and 6",
        ),
    ],
)
def test_impossible_divisions(changes, message):
    plan = dataclasses.replace(Plan(MeshShape(), 512, 1), **changes)
    with pytest.raises(UserError, match=message):
        check(GPT_8B.model, plan)
