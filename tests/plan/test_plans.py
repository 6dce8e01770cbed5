"""Meshes as typed, plans from configs, and divisions that leave a rest."""

import dataclasses

import pytest

from mtjax import config
from mtjax.errors import UserError
from mtjax.theory.flops import Shape
from mtjax.theory.plans import Plan, Ways, check, parse_ways

GPT_8B = Shape.gpt(72, 3072, 32, 1024, 51_200)


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("64x8", Ways(64, 1, 8)),
        ("data=8,stage=4,model=8", Ways(8, 4, 8)),
        (" model=2 , data=3 ", Ways(3, 1, 2)),
        ("stage=4", Ways(1, 4, 1)),
    ],
)
def test_meshes(text, ways):
    assert parse_ways(text) == ways
    assert parse_ways(str(ways)) == ways


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64", "neither DATAxMODEL"),
        ("64x", "neither DATAxMODEL"),
        ("0x8", "at least 1"),
        ("data=8,modle=2", "no axis is called 'modle' - did you mean 'model'"),
        ("data=8,data=2", "gives data twice"),
        ("-1x2", "neither DATAxMODEL"),
        ("2x4x8", "neither DATAxMODEL"),
    ],
)
def test_wrong_meshes(text, message):
    with pytest.raises(UserError, match=message):
        parse_ways(text)


def test_the_plan_of_a_config():
    run = config.load("gpt2-8.3b")
    plan = Plan.of(run, parse_ways(run.parallel.mesh))
    assert (plan.microbatch_size, plan.microbatches, plan.recompute, plan.element_bytes) == (8, 1, "full", 2)
    assert plan.dropout and not plan.flash_attention
    without = config.replace(run, attention_dropout=0.0)
    assert Plan.of(without, Ways(64, 1, 8)).flash_attention
    assert not Plan.of(config.replace(without, attention="xla"), Ways(64, 1, 8)).flash_attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ways": Ways(1, 1, 3)},
            "num_heads 32 does not divide over 3 model ways; the nearest ways that fit are 2 and 4",
        ),
        ({"ways": Ways(1, 5, 1)}, "num_layers 72 does not divide over 5 stages x chunks; .* 4 and 6"),
        ({"ways": Ways(7, 1, 1)}, r"512 is no multiple of 7 data ways x microbatch_size 1 = 7; .*: 511 and 518"),
        ({"zero": 4}, "ZeRO has stages 0 to 3, not 4"),
        ({"chunks": 2}, "2 chunks per stage need --schedule interleaved"),
        (
            {"ways": Ways(1, 3, 1), "schedule": "interleaved", "chunks": 2, "global_batch_size": 4},
            "needs a multiple of 3 stages as microbatches, not 4",
        ),
    ],
)
def test_impossible_divisions(changes, message):
    plan = dataclasses.replace(Plan(Ways(), 512, 1), **changes)
    with pytest.raises(UserError, match=message):
        check(GPT_8B, plan)
