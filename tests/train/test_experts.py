"""Experts on ranks of their own: the same losses, gradients and states as one device."""

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

from mtjax.models.routers import LOAD, LOST, ROUTER_AUX_LOSS, Z_LOSS
from mtjax.models.teacher import HARD, SOFT
from mtjax.train.observability.expert_load import describe_load, load_entries
from tests.same_numbers import assert_same, by_name
from tests.tiny import batch_of, host_batch, initial_state, program_of, tiny_config
from tests.train.test_stages import PLAIN

MASKS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS: dict[str, Any] = {
    "family": "llama",
    "num_kv_heads": 4,
    "num_experts": 8,
    "mlp_size": 48,
    "init_std": 0.1,
    **MASKS,
    "router_aux_loss": 0.02,
    "router_z_loss": 1e-3,
}
"""Softmax, the two best of eight, both losses and both dropouts."""
DEEPSEEK: dict[str, Any] = PLAIN | {
    "family": "gpt",
    "router_score": "sigmoid",
    "router_bias": True,
    "router_bias_update_rate": 0.05,
    "router_jitter": 0.1,
    "experts_top_k": 3,
    "expert_groups": 4,
    "expert_groups_top_k": 2,
    "shared_expert_size": 16,
}
"""Biases that learn from the load, groups of which two are kept, numbers that the router's input is multiplied by, and
a shared expert."""

BIASED: dict[str, Any] = {
    "router_linear_bias": True,
    "expert_bias": True,
    "shared_expert_size": 16,
    "shared_expert_gate": True,
    "activation": "swiglu_clamped",
}
"""Biases of routers and experts, and a gate of the shared expert."""

CAPACITY: dict[str, Any] = {"capacity_factor": 0.75}
"""Some tokens of each sample are lost."""

DENSE: dict[str, Any] = {"num_layers": 3, "first_dense_layers": 1}
"""Two layers with experts behind one with an MLP."""

EXCHANGE: dict[str, Any] = {
    "expert_dispatch": "all-to-all",
    "sequence_parallel": True,
    "zero": 3,
    "microbatch_size": 1,
    "recompute": "selective",
}
"""Tokens are sent between expert ranks, and parameters are sharded over data (ZeRO 3)."""

PADDED: dict[str, Any] = {"task": "chat"}
"""Samples of chats, which end in padding."""

TURNS: dict[str, Any] = {"num_layers": 6, "moe_every": 3}
"""Two layers with experts, each behind two with an MLP."""

# (mesh, model, what does not change the numbers); masks double the time to compile: some have none.
CASES: list[Any] = [
    pytest.param(
        "data=2,expert=2,model=2",
        DEEPSEEK,
        {"sequence_parallel": True, "zero": 3, "microbatch_size": 1, "recompute": "selective"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=2,expert=2,model=2",
        DENSE | PLAIN,
        {"sequence_parallel": True, "zero": 2, "microbatch_size": 1, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,expert=4,model=2",
        CAPACITY | PLAIN,
        {"sequence_parallel": True, "zero": 1, "microbatch_size": 1, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("data=2,expert=2,model=2", BIASED | PLAIN, EXCHANGE, marks=pytest.mark.long),
    pytest.param(
        "data=1,stage=2,expert=2,model=2", BIASED, {"zero": 1, "recompute": "full"}, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "data=2,expert=2,model=2", BIASED | DENSE, {"zero": 2, "recompute": "full"}, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "data=1,context=2,expert=2,model=2",
        BIASED,
        {"sequence_parallel": True, "zero": 1, "recompute": "none"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("data=1,expert=4,model=1", {}, {"zero": 1, "recompute": "full"}, marks=pytest.mark.exhaustive),
    pytest.param(
        "data=2,expert=2,model=2",
        DEEPSEEK | TURNS,
        {"sequence_parallel": True, "zero": 2, "microbatch_size": 1, "recompute": "full"},
        marks=pytest.mark.long,
    ),
    pytest.param("2x2", TURNS, {"zero": 3, "recompute": "selective"}, marks=pytest.mark.exhaustive),
    pytest.param(
        "data=2,expert=2,model=2",
        DEEPSEEK | MASKS,
        EXCHANGE,
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,expert=4,model=2",
        DENSE,
        {"expert_dispatch": "all-to-all", "zero": 1, "microbatch_size": 2, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
]
PADDING: list[Any] = [
    pytest.param(
        "data=2,expert=2,model=2",
        DEEPSEEK | PADDED,
        EXCHANGE,
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,context=2,expert=2,model=2",
        CAPACITY | PADDED | PLAIN,
        {"sequence_parallel": True, "zero": 2, "recompute": "full", "microbatch_size": 2},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=2",
        CAPACITY | PADDED | PLAIN,
        {"sequence_parallel": True, "zero": 1, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("2x2", PADDED, {"zero": 2, "recompute": "none"}, marks=pytest.mark.exhaustive),
]
"""Padding is in no report, and takes no place of an expert from text."""
STAGES: list[Any] = [
    pytest.param(
        "data=1,stage=2,expert=2,model=2",
        CAPACITY,
        {"sequence_parallel": True, "zero": 1, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=2,stage=2,expert=2,model=1",
        DEEPSEEK | PLAIN | {"num_layers": 6},
        {"zero": 3, "recompute": "none", "pipeline_schedule": "interleaved", "chunks": 2, "layers_per_stage": (4, 2)},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=2",
        DEEPSEEK | {"num_layers": 6},
        {
            "expert_dispatch": "all-to-all",
            "sequence_parallel": True,
            "zero": 2,
            "recompute": "selective",
            "layers_per_stage": (2, 4),
        },
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=1",
        {"num_layers": 6},
        {"zero": 0, "recompute": "full", "pipeline_schedule": "gpipe"},
        marks=pytest.mark.exhaustive,
    ),
]
"""Each stage reports what its own layers' routers say; in the second, layers are stacked in another order than they
run in, and two places are empty."""
MIXED: list[Any] = [
    pytest.param(
        "data=2,stage=2,expert=2,model=1",
        DEEPSEEK | PLAIN | {"num_layers": 8, "moe_every": 2},
        {"zero": 2, "recompute": "selective", "pipeline_schedule": "interleaved", "chunks": 2},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=2",
        CAPACITY | PLAIN | {"num_layers": 5, "first_dense_layers": 3},
        {"sequence_parallel": True, "zero": 1, "recompute": "full", "layers_per_stage": (2, 3)},
        marks=pytest.mark.long,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=1",
        {"num_layers": 6, "moe_every": 2},
        {"zero": 3, "recompute": "full", "layers_per_stage": (2, 4)},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=1,stage=2,expert=2,model=1",
        DEEPSEEK | {"num_layers": 8, "first_dense_layers": 1},
        {"zero": 3, "recompute": "none", "pipeline_schedule": "interleaved", "chunks": 2},
        marks=pytest.mark.exhaustive,
    ),
]
"""Stages and their chunks have layers with experts and without, some one kind alone."""
CONTEXT: list[Any] = [
    pytest.param(
        "data=1,context=2,expert=2,model=2",
        DEEPSEEK | PADDED,
        {"expert_dispatch": "all-to-all", "sequence_parallel": True, "zero": 3, "recompute": "full"},
        marks=pytest.mark.long,
    ),
    pytest.param(
        "data=2,context=2,expert=2,model=1", {}, {"zero": 3, "recompute": "none"}, marks=pytest.mark.exhaustive
    ),
    pytest.param(
        "data=1,context=2,expert=2,model=2",
        CAPACITY | PLAIN,
        {"sequence_parallel": True, "zero": 2, "recompute": "full", "microbatch_size": 2},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param("data=1,context=4,model=1", CAPACITY, {"recompute": "selective"}, marks=pytest.mark.exhaustive),
    pytest.param(
        "data=1,stage=2,context=2,expert=2,model=1",
        DEEPSEEK,
        {"zero": 2, "recompute": "full"},
        marks=pytest.mark.exhaustive,
    ),
]
"""Ranks that share samples know a sample's load together."""
PRODUCT = [
    pytest.param(
        mesh,
        model,
        {"recompute": recompute, "zero": zero, "sequence_parallel": split, "expert_dispatch": method},
        marks=pytest.mark.exhaustive,
    )
    for mesh, model, (recompute, zero), split, method in itertools.product(
        ("data=1,expert=2,model=1", "data=1,expert=4,model=2", "data=2,expert=2,model=2", "2x4"),
        ({}, DEEPSEEK, CAPACITY),
        (("none", 0), ("selective", 1), ("full", 2), ("none", 3), ("full", 3)),
        (False, True),
        ("all-gather", "all-to-all"),
    )
    if method == "all-gather" or (model != CAPACITY and "expert" in mesh)
]


def results(program: Any, *, evaluates: bool = True) -> dict[str, np.ndarray]:
    """Metrics of two steps, the moments after the first, in which all gradients are, the routers' biases after both,
    and the loss of a batch without dropout."""
    state, found = initial_state(program), {}
    if evaluates:
        total, count = program.evaluation(state.parameters, batch_of(program, 0))["loss"]
        found["evaluated"] = np.asarray(total / count)
    for step in range(2):
        state, metrics = program.step(state, batch_of(program, step))
        names = ("loss", "grad_norm", ROUTER_AUX_LOSS, Z_LOSS, LOAD, LOST)
        found |= {f"{name} {step}": np.asarray(metrics[name]) for name in names if name in metrics}
        if step == 0:
            found |= by_name(program, state.optimizer)
    bias = by_name(program, state.parameters).get("stack.layers.experts.router.bias")
    return found if bias is None else found | {"biases": bias}


@cache
def one_device(model: Any) -> dict[str, np.ndarray]:
    return results(program_of("1x1", **dict(model)))


@pytest.mark.parametrize(("mesh", "model", "settings"), [*CASES, *PADDING, *STAGES, *MIXED, *CONTEXT, *PRODUCT])
def test_steps_are_those_of_one_device(mesh, model, settings):
    # With Adam's own epsilon, elements whose gradient is rounding noise take steps as long as the others'.
    model = EXPERTS | {"epsilon": 1e-4} | model
    known = one_device(tuple(model.items()))
    program = program_of(mesh, **model, **{"microbatch_size": 1} | settings)
    found = results(program)
    for name, value in known.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5 * np.abs(value).max(), err_msg=name)
    layers = model.get("num_layers", 2) // model.get("moe_every", 1) - model.get("first_dense_layers", 0)
    batch = host_batch(tiny_config(**model), 0)
    text = batch["padding_mask"].sum() if "padding_mask" in batch else 8 * 16
    assert known[f"{LOAD} 0"].sum() == layers * text * model.get("experts_top_k", 2)
    assert ("capacity_factor" in model) == (known.get(f"{LOST} 0", np.zeros(1)).sum() > 0)
    if "biases" in known:
        assert {-1, 0, 1} >= set(np.unique(np.round(known["biases"] / 0.05))) - {-2, 2}
        assert np.abs(known["biases"]).max() > 0.04
    assert_same(program, program_of("1x1", **model))


def test_a_student_s_step_reports_its_routers_beside_both_losses():
    program = program_of("1x1", **EXPERTS, teacher="a test", teacher_width=24)
    _, metrics = program.lower_step().out_info
    assert {"loss", HARD, SOFT, ROUTER_AUX_LOSS, Z_LOSS, LOAD} <= metrics.keys()


def test_the_load_in_metrics_and_in_words():
    counts = np.array([[10, 30, 20, 20], [0, 80, 0, 0]], np.float32)
    entries = load_entries(counts, None)
    assert entries == {
        "expert_load": [[0.5, 1.5, 1.0, 1.0], [0.0, 4.0, 0.0, 0.0]],
        "expert_load_max": 4.0,
        "dead_experts": 3,
    }
    behind_dense = load_entries(counts, None, [0])
    assert behind_dense["expert_load"] == [[], *entries["expert_load"]]
    assert "expert 0 of layer 2" in (describe_load(behind_dense) or "")
    named = "no tokens for expert 0 of layer 1, expert 2 of layer 1, expert 3 of layer 1"
    assert describe_load(entries) == f"busiest expert 4.00x, {named}"
    assert describe_load(load_entries(counts[:1], np.array([4.0]))) == "busiest expert 1.50x, 5.0% lost"
    assert describe_load({}) is None


def test_the_load_of_fewer_choices_than_experts_and_of_none():
    few = load_entries(np.array([[2, 0, 0, 0], [1, 1, 0, 0]], np.float32), np.array([1.0, 0.0]))
    assert few["expert_load"] == [[4.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]]
    assert few["lost_share"] == 0.25
    padding = load_entries(np.zeros((2, 4), np.float32), np.zeros(2))
    assert (padding["expert_load_max"], padding["lost_share"]) == (0.0, 0.0)
