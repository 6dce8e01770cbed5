"""What ranks with experts of their own send, in compiled programs: tokens to experts, and what these say of them.

Gradients of experts are summed over data alone, those of all else over data and expert together.
"""

from typing import Any

import pytest

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import crossing_in_layers, needs_aot, tiny

EXPERTS: dict[str, Any] = {"family": "llama", "num_experts": 4, "attention": "xla", "global_batch_size": 16}
"""3 layers, microbatches of 2 samples of 64 tokens; each token goes to 2 of 4 experts."""
GATHER = EXPERTS | {"mesh": "data=1,expert=4,model=2", "recompute": "none"}
SPLIT = EXPERTS | {"mesh": "data=2,expert=2,model=2", "sequence_parallel": True}
EXCHANGE = EXPERTS | {"mesh": "data=1,expert=4,model=2", "expert_dispatch": "all-to-all"}
CAPACITY = EXPERTS | {"mesh": "data=1,expert=4,model=2", "capacity_factor": 1.0}
STAGES = EXPERTS | {"mesh": "data=1,stage=2,expert=2,model=2", "num_layers": 4}
INTERLEAVED = EXPERTS | {"mesh": "data=2,stage=2,expert=2,model=1", "num_layers": 8}
INTERLEAVED |= {"pipeline_schedule": "interleaved", "chunks": 2, "recompute": "selective", "zero": 3}
SHARED = EXPERTS | {"mesh": "data=1,context=2,expert=2,model=2", "sequence_parallel": True, "zero": 1}
"""Ranks that share samples."""
BIASED: dict[str, Any] = {
    "router_linear_bias": True,
    "expert_bias": True,
    "activation": "swiglu_clamped",
    "shared_expert_size": 64,
    "shared_expert_gate": True,
}
"""Biases of routers and experts, and a gate of the shared expert."""
MANY: dict[str, Any] = {"num_experts": 160, "expert_size": 16}
"""Of 8 layers, so many that their load is not a small number."""


@pytest.mark.parametrize(
    "settings",
    [
        GATHER | {"first_dense_layers": 1},
        pytest.param(SPLIT | BIASED | {"zero": 3, "qk_norm": True, "expert_groups": 2}, marks=pytest.mark.long),
        pytest.param(EXPERTS | {"mesh": "2x2", "shared_expert_size": 64}, marks=pytest.mark.long),
        pytest.param(CAPACITY, marks=pytest.mark.long),
        pytest.param(EXCHANGE | {"first_dense_layers": 1}, marks=pytest.mark.exhaustive),
        pytest.param(INTERLEAVED | MANY | {"router_bias": True}, marks=pytest.mark.long),
        pytest.param(SHARED | {"router_aux_loss": 0.0}, marks=pytest.mark.long),
        pytest.param(SHARED, marks=pytest.mark.exhaustive),
        pytest.param(
            SPLIT | MANY | {"num_layers": 8, "zero": 1, "grad_reduce_dtype": "bfloat16"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=[
        "gather, one layer without",
        "split sequences, ZeRO-3",
        "shared expert, reduced apart",
        "capacity",
        "exchange, one layer without",
        "stages, interleaved, ZeRO-3, many experts",
        "shared samples, no balance loss",
        "shared samples",
        "many experts, bfloat16 on the wire",
    ],
)
def test_contracts_hold_on_cpus(settings: dict[str, Any]) -> None:
    assert inspect(tiny(**{"num_layers": 2} | settings), find_target("cpu")).verdict.violations == ()


@needs_aot
def test_h100s_gather_tokens_of_all_ranks_and_send_home_what_experts_say() -> None:
    """2 microbatches: of 4 ranks' 2 samples each, with numbers of two experts a token and how much each counts."""
    report = inspect(tiny(**GATHER), find_target("h100x8"))
    assert report.verdict.violations == ()
    tokens, gates, numbers = "bf16[8,64,64]", "f32[8,64,2]", "s32[8,64,2]"
    once = 3 * 2
    assert crossing_in_layers(report, "expert") == {
        (LAYER_FORWARD, "all-gather", tokens): once,
        (LAYER_FORWARD, "all-gather", gates): once,
        (LAYER_FORWARD, "all-gather", numbers): once,
        (LAYER_FORWARD, "reduce-scatter", tokens): once,
        (LAYER_BACKWARD, "all-gather", tokens): 2 * once,
        (LAYER_BACKWARD, "all-gather", gates): once,
        (LAYER_BACKWARD, "all-gather", numbers): once,
        (LAYER_BACKWARD, "reduce-scatter", tokens): once,
        (LAYER_BACKWARD, "reduce-scatter", gates): once,
    }
    assert report.flops.difference == 0


@needs_aot
def test_h100s_send_tokens_to_those_ranks_alone_that_have_their_experts() -> None:
    """2 microbatches, twice forward and three times backward, in arrays with room for all 4 ranks' 2 samples of 64
    tokens; each rank is sent half of them: of 4 experts a token goes to 2."""
    report = inspect(tiny(**EXCHANGE | {"recompute": "none"}), find_target("h100x8"))
    assert report.verdict.violations == ()
    room, gates, numbers, once = "bf16[512,64]", "f32[8,64,2]", "s32[8,64,2]", 3 * 2
    found = crossing_in_layers(report, "expert")
    assert found == {
        (LAYER_FORWARD, "ragged-all-to-all", room): 2 * once,
        (LAYER_FORWARD, "all-gather", gates): once,
        (LAYER_FORWARD, "all-gather", numbers): once,
        (LAYER_BACKWARD, "ragged-all-to-all", room): 3 * once,
        (LAYER_BACKWARD, "all-gather", gates): once,
        (LAYER_BACKWARD, "all-gather", numbers): once,
        (LAYER_BACKWARD, "reduce-scatter", gates): once,
    }
    sent = {c.wire_bytes for c in report.collectives if c.kind == "ragged-all-to-all"}
    assert sent == {(512 / 2 * 64 * 2 + 4 * 8) * 3 / 4}
    assert report.flops.difference == 0


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            SPLIT | {"zero": 3, "expert_dispatch": "all-to-all", "experts_top_k": 3, "recompute": "full"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            SPLIT | BIASED | {"zero": 3, "first_dense_layers": 1, "router_bias": True}, marks=pytest.mark.exhaustive
        ),
        pytest.param(GATHER | BIASED | {"recompute": "full"}, marks=pytest.mark.exhaustive),
        SPLIT | {"zero": 2, "moe_every": 3, "num_layers": 6, "recompute": "selective", "microbatch_size": 1},
        pytest.param(
            EXPERTS
            | {"mesh": "data=2,expert=2,model=2", "recompute": "selective", "zero": 1, "shared_expert_size": 64},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(CAPACITY, marks=pytest.mark.exhaustive),
        pytest.param(
            SPLIT
            | {"zero": 2, "recompute": "none", "expert_groups": 2, "capacity_factor": 1.5, "shared_expert_size": 64},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            STAGES | {"recompute": "none", "zero": 2, "capacity_factor": 1.5, "shared_expert_size": 64},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(INTERLEAVED, marks=pytest.mark.exhaustive),
        pytest.param(INTERLEAVED | {"moe_every": 2}, marks=pytest.mark.exhaustive),
        pytest.param(
            STAGES
            | {
                "num_layers": 5,
                "first_dense_layers": 3,
                "layers_per_stage": (2, 3),
                "sequence_parallel": True,
                "zero": 1,
            },
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            EXPERTS
            | {"mesh": "data=2,context=2,expert=2,model=1", "recompute": "full", "zero": 3, "capacity_factor": 1.0},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=[
        "exchange, split sequences, ZeRO-3",
        "split sequences, ZeRO-3, biases, a layer without",
        "gather, biases",
        "every third layer, a sample at a time, ZeRO-2",
        "shared expert, ZeRO-1",
        "capacity",
        "capacity, split sequences, shared, ZeRO-2",
        "stages, capacity, shared, residuals kept, ZeRO-2",
        "stages, interleaved, ZeRO-3",
        "stages, interleaved, every second layer, ZeRO-3",
        "stages, split sequences, three layers without, ZeRO-1",
        "shared samples, capacity, ZeRO-3",
    ],
)
def test_contracts_hold_on_h100s(settings: dict[str, Any]) -> None:
    report = inspect(tiny(**settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert abs(report.flops.difference) <= (1e-3 if "stage" in settings["mesh"] else 0)  # beside layers, the timetable


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        GATHER,
        pytest.param(SPLIT | {"zero": 3, "recompute": "full"}, marks=pytest.mark.exhaustive),
        pytest.param(SPLIT | {"zero": 1, "recompute": "none"}, marks=pytest.mark.exhaustive),
    ],
    ids=["gather", "split sequences, ZeRO-3, full recompute", "split sequences, ZeRO-1"],
)
def test_unrolled_layers_with_experts_keep_the_contract_on_h100(settings: dict[str, Any]) -> None:
    report = inspect(tiny(**settings, unroll_layers=True), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert abs(report.flops.difference) < 0.01
