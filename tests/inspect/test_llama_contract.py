"""Contracts of Llama and of decoders with shared key and value heads, on compiled programs."""

from typing import Any

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from tests.counted import rank_parameters
from tests.inspect.steps import needs_aot, required_of, tiny
from tests.inspect.test_contract import sent
from tests.tiny import LATENT

LLAMA: dict[str, Any] = {"family": "llama", "num_kv_heads": 2, "mlp_size": 176}
"""2 key and value heads on 4 ways; l = 3, h = 64, k = 32, microbatches of 2 x 64 tokens."""
BSH = 2 * 64 * 64
ATTENTION: dict[str, Any] = {
    "attention_bias": "qkv",
    "qk_norm": True,
    "qk_norm_scope": "width",
    "attention_sinks": True,
    "attention_softcap": 5.0,
}
"""Of each token two sums of squares cross the ranks, and two of their gradients."""
DIFFERENT: dict[str, Any] = {
    "attention_window": 9,
    "window_layers": "SF",
    "rope_layers": "NR",
    "rope_fraction": 0.5,
    "rope_local_theta": 10.0,
    "attention": "xla",
}
"""Of layers that differ; nothing is sent for that."""
SHARED = 2 * 64 * 32
"""Elements of a layer's key and value weights."""


def of_layers(report: Report) -> dict[str, dict[tuple[str, int, str], int]]:
    return {phase: sent(report, f"layer {phase}") for phase in ("forward", "recompute", "backward")}


SUMS = ("all-reduce", "bf16")
AHEAD: dict[str, Any] = {"family": "llama", "mtp_num_layers": 2}
LATENTS: dict[str, Any] = {"family": "llama", "q_lora_rank": 40, **LATENT}


@needs_aot
def test_a_layer_sends_figure_4_and_the_shared_heads_on_h100() -> None:
    """Query, key and value are one product, gate and up another: one cotangent each."""
    report = inspect(tiny(**LLAMA), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert of_layers(report) == {
        "forward": {("all-reduce", BSH, "bf16"): 12},
        "recompute": {("all-reduce", BSH, "bf16"): 6},
        "backward": {("all-reduce", BSH, "bf16"): 12, ("all-reduce", SHARED, "f32"): 6},
    }
    gradients = sum(e * n for (_, e, _), n in sent(report, "gradients", ("data",)).items())
    assert gradients - rank_parameters(anatomy_of(report.config.model), 4) in range(3)
    assert abs(report.flops.difference) < 0.01


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"sequence_parallel": True, "zero": 3}],
    ids=["whole", "split, ZeRO-3"],
)
def test_norms_of_the_width_add_two_numbers_per_token_on_h100(settings: dict[str, Any]) -> None:
    report = inspect(tiny(num_layers=2, attention="xla", **LLAMA, **ATTENTION, **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    for phase in ("forward", "recompute", "backward"):
        found = sent(report, f"layer {phase}")
        assert sum(n for (_, elements, dtype), n in found.items() if (elements, dtype) == (2 * 64, "f32")) == 2 * 2 * 2
    assert abs(report.flops.difference) < 0.01


@needs_aot
def test_split_latents_are_gathered_in_place_of_hidden_states_on_h100() -> None:
    """A layer's latents of 20 and 40 and its key of 6, for 2 x 64 tokens; their matrices' gradients are added up."""
    report = inspect(tiny(**LATENTS, sequence_parallel=True, attention="xla", num_layers=2), find_target("h100x8"))
    assert report.verdict.violations == ()
    found, latents = of_layers(report), {2 * 64 * width: 4 for width in (20, 40, 6)}
    for phase, kind in (("forward", "all-gather"), ("recompute", "all-gather"), ("backward", "reduce-scatter")):
        own = {size: n for (what, size, _), n in found[phase].items() if what == kind and size in latents}
        assert own == latents
    matrices = sum(size * n for (kind, size, dtype), n in found["backward"].items() if (kind, dtype) == SUMS)
    assert matrices == 4 * 64 * (26 + 40)
    assert abs(report.flops.difference) < 0.01


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "own", "in_loops"),
    [
        ({**AHEAD, **LATENTS, "sequence_parallel": True, "zero": 1}, 2 * (2 * 64 * 64 + 64 * 66), 2 * 2 * 64 * 66),
        ({**LLAMA, "mlp_size": 192, "unroll_layers": True, "recompute": "none"}, 2 * SHARED, 0),
        pytest.param({**LLAMA, "mtp_num_layers": 1}, SHARED, 2 * 2 * SHARED, marks=pytest.mark.exhaustive),
    ],
    ids=["tokens ahead, latent attention", "unrolled, shared heads", "tokens ahead, shared heads"],
)
def test_gradients_of_replicated_matrices_outside_loops_are_added_once_a_step_on_h100(
    settings: dict[str, Any], own: int, in_loops: int
) -> None:
    """XLA adds up those of both microbatches first; in a loop over layers it adds the ranks' for each microbatch.

    192 are 48 on a rank: an MLP of 44 would be padded by XLA to 48 for cuBLAS, which computes unrolled layers' matmuls.
    """
    report = inspect(tiny(num_layers=2, attention="xla", **settings), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert abs(report.flops.difference) < 0.01
    dtype = "bf16" if "sequence_parallel" in settings else "f32"

    def added(*phases: str) -> int:
        found = [s for phase in phases for s in sent(report, phase).items()]
        return sum(elements * n for (kind, elements, of), n in found if (kind, of) == ("all-reduce", dtype))

    assert (added("layer backward"), added("gradients", "other")) == (in_loops, own)


@pytest.mark.parametrize(
    ("settings", "least", "most"),
    [
        (AHEAD, 2 * 2 * 64 * 64, 2 * 2 * 2 * 64 * 64),
        (LATENTS, 2 * 2 * 64 * 66, 2 * 2 * 64 * 66),
        (LATENTS | {"unroll_layers": True, "recompute": "none"}, 2 * 64 * 66, 2 * 2 * 64 * 66),
    ],
    ids=["tokens ahead", "latents in a loop", "latents, unrolled"],
)
def test_sums_of_microbatches_may_be_reduced_where_no_loop_over_layers_is(
    settings: dict[str, Any], least: int, most: int
) -> None:
    required = required_of(tiny(num_layers=2, sequence_parallel=True, zero=1, **settings))
    (own,) = (r for r in required if r.line.phase == "layer backward" and (r.line.kind, r.dtype) == SUMS)
    assert (own.min_elements, own.total) == (least, most)


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({**LLAMA, "num_kv_heads": 4, "num_heads": 8, **DIFFERENT}, 0),
        ({**LLAMA, "sequence_parallel": True, "zero": 3, "qk_norm": True}, SHARED),
        pytest.param({"num_kv_heads": 2, "position": "rope", "activation": "geglu"}, SHARED, marks=pytest.mark.long),
        pytest.param({**LLAMA, **ATTENTION, "recompute": "none"}, SHARED, marks=pytest.mark.exhaustive),
        pytest.param({**LATENTS, "q_lora_rank": 0, "recompute": "none"}, 0, marks=pytest.mark.long),
        ({**LATENTS, "sequence_parallel": True, "zero": 1}, 0),
        pytest.param(AHEAD | {"mesh": "data=2,stage=2,model=2", "zero": 2}, 0, marks=pytest.mark.exhaustive),
        pytest.param(AHEAD | {"sequence_parallel": True, "zero": 3}, 0, marks=pytest.mark.exhaustive),
    ],
    ids=[
        *("as many as ways", "split sequence, ZeRO-3, norms of heads", "GPT with biases", "norms of the width"),
        *("latent attention, queries from hidden states", "latent attention, split sequence, ZeRO-1"),
        *("tokens ahead, stages, ZeRO-2", "tokens ahead, split sequence, ZeRO-3"),
    ],
)
def test_contracts_hold_on_cpus(settings: dict[str, Any], shared: int) -> None:
    report = inspect(tiny(num_layers=2, **settings), find_target("cpu"))
    assert report.verdict.violations == ()
    found = of_layers(report)["backward"]
    assert sum(n for (_, elements, _), n in found.items() if elements == SHARED) == (4 if shared else 0)
    assert abs(report.flops.difference) < 0.01
