"""Traffic by formula: the contract's counts, ring factors and volumes."""

import dataclasses
from dataclasses import replace
from typing import get_args

import pytest

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of, gpt
from mtjax.analysis.contract import Kind
from mtjax.analysis.traffic import RING_PASSES, bandwidth_demand, ring_factor, sent_by_axis, transfers
from mtjax.config import Config
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.rules import DATA, STAGE
from tests.counted import rank_parameters

GPT_8B = gpt(72, 3072, 32, 1024, 51_200)
TENSOR = Plan(parse_mesh("64x1x8"), 512, 8, recompute="full")


def test_groups_gather_inside_and_send_each_other_a_shard_of_every_gradient_once():
    """By hand, of parameters that all divide: ZeRO-3 with 4 microbatches on 8 groups of 8."""
    plan = Plan(parse_mesh("data=8,shard=8"), 512, 2, recompute="full", zero=3)
    sent, size = sent_by_axis(transfers(GPT_8B, plan)), rank_parameters(GPT_8B, 1)
    assert sent["data"] == 2 * 7 / 8 * 4 * size / 8
    assert sent["shard"] == pytest.approx(4 * 7 / 8 * (4 + 2 + 2) * size, rel=0.01)  # the table is gathered once
    assert set(sent) == {"data", "shard"}


def test_ring_factors():
    assert ring_factor("all-reduce", 8) == 2 * 7 / 8
    assert ring_factor("all-gather", 8) == ring_factor("reduce-scatter", 8) == 7 / 8
    assert ring_factor("send", 4) == 1
    assert ring_factor("all-reduce", 1) == 0
    assert set(get_args(Kind)) <= set(RING_PASSES)  # or a contract's line would count as point to point


@pytest.mark.parametrize(
    ("sequence", "recompute", "total"),
    [(False, "none", 4), (False, "full", 5), (True, "none", 10), (True, "selective", 10), (True, "full", 11)],
)
def test_collectives_of_a_layer(sequence, recompute, total):
    plan = dataclasses.replace(TENSOR, sequence_parallel=sequence, recompute=recompute)
    assert sum(of_a_layer(plan).values()) == total


def of_a_layer(plan: Plan) -> dict[tuple[str, str], float]:
    """(phase, operation) -> arrays of batch x sequence x hidden of each layer and microbatch."""
    lines = [e for e in transfers(GPT_8B, plan) if e.purpose.startswith("layer") and e.element_bytes == 2]
    return {(e.purpose.partition(":")[0], e.operation): e.count / 72 for e in lines}


def test_groups_are_computed_again_twice_and_blocks_not_at_all():
    def again(**changes) -> dict[str, float]:
        plan = dataclasses.replace(TENSOR, **changes)
        return {c.operation: c.count for c in transfers(GPT_8B, plan) if c.purpose.startswith("layer recompute")}

    assert again() == {"all-reduce": 72}
    assert again(recompute_group=2) == {"all-reduce": 2 * 72}
    assert again(recompute_first=10) == {"all-reduce": 10}
    assert again(sequence_parallel=True) == {"all-gather": 2 * 72, "reduce-scatter": 72}
    assert again(sequence_parallel=True, recompute_group=2) == {"all-gather": 4 * 72, "reduce-scatter": 2 * 72}
    assert again(sequence_parallel=True, recompute_first=10) == {"all-gather": 2 * 72, "reduce-scatter": 10}
    gathers = [
        next(
            c.count
            for c in transfers(GPT_8B, dataclasses.replace(TENSOR, zero=3, recompute_group=group))
            if "matrices of the layers" in c.purpose
        )
        for group in (1, 2)
    ]
    assert gathers == [2, 3]


def test_paper_says_four_all_reduces_and_pytorch_recomputes_two_more():
    none = of_a_layer(dataclasses.replace(TENSOR, recompute="none"))
    assert none == {("layer forward", "all-reduce"): 2, ("layer backward", "all-reduce"): 2}
    pytorch = of_a_layer(dataclasses.replace(TENSOR, drops_last_reduction=False))
    assert pytorch["layer recompute", "all-reduce"] == 2


def test_layers_dominate_the_model_axis():
    entries = [c for c in transfers(GPT_8B, TENSOR) if c.purpose.startswith("layer")]
    hidden = 8 * 1024 * 3072
    assert sum(c.count * c.elements for c in entries) == 72 * 5 * hidden
    assert sum(c.sent for c in entries) == pytest.approx(72 * 5 * hidden * 2 * 2 * 7 / 8)


def test_gradients_cross_the_data_axis_once_however_many_microbatches():
    small = dataclasses.replace(TENSOR, microbatch_size=1)
    for plan in (TENSOR, small):
        (gradients,) = [c for c in transfers(GPT_8B, plan) if c.axis == DATA]
        assert (gradients.operation, gradients.count) == ("all-reduce", 1)
        assert gradients.size == 4 * rank_parameters(GPT_8B, 8)


def test_zero_1_moves_less_than_an_all_reduce_and_zero_2_grows_with_microbatches():
    """Gradients in four bytes and, for the other half of an all-reduce, matrices in two."""

    def sent(zero: int, microbatch: int = 8) -> float:
        plan = dataclasses.replace(TENSOR, zero=zero, microbatch_size=microbatch)
        return sent_by_axis(transfers(GPT_8B, plan))[DATA]

    assert sent(1) == pytest.approx(sent(0) * 3 / 4, rel=1e-3)
    assert sent(2, microbatch=1) > 4 * sent(1)
    assert sent(2, microbatch=8) == sent(1)


def test_gradients_in_bfloat16_are_half_the_bytes_and_parameters_are_not():
    """Of a run; ZeRO-1's gathers stay what they are, and the tables that stages share follow."""
    run = config.replace(Config(), num_layers=4, vocab_size=1000, zero=1, microbatch_size=1)

    def sent(wire: str) -> dict[tuple[str, str], float]:
        plan = Plan.of(config.replace(run, grad_reduce_dtype=wire), parse_mesh("4x2x2"))
        found: dict[tuple[str, str], float] = {}
        for c in transfers(anatomy_of(run.model), plan):
            found[c.axis, c.phase] = found.get((c.axis, c.phase), 0) + c.sent
        return found

    whole, half = sent("float32"), sent("bfloat16")
    gradients = {(DATA, "gradients"), (STAGE, "gradients")}
    assert half == {key: size / 2 if key in gradients else size for key, size in whole.items()} and gradients <= set(
        whole
    )


def test_stages_send_activations_both_ways_split_under_sequence_parallelism():
    plan = Plan(parse_mesh("2x4x8"), 64, 2, sequence_parallel=True)
    (send,) = [c for c in transfers(GPT_8B, plan) if c.axis == STAGE and c.operation == "collective-permute"]
    assert send.count == 2 * (plan.microbatches + 3)
    (theirs,) = [c for c in transfers(GPT_8B, replace(plan, residuals="megatron")) if c.axis == STAGE]
    assert theirs.count == 2 * plan.microbatches
    assert send.elements == theirs.elements == 2 * 1024 * 3072 / 8


def test_bandwidth_demand():
    assert bandwidth_demand(1e9, 2.0, 0.05) == pytest.approx(1e10)
