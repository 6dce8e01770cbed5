"""Ranks that share the tokens of samples: the same losses, gradients and states as one device.

Of the covering cases `tests/train/test_step.py` has one, with ring, split sequences and full recompute.
"""

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.models.kernels import blocks
from tests.same_numbers import MOMENT, assert_same, by_name
from tests.tiny import LATENT, batch_of, initial_state, program_of, run_steps

LLAMA: dict[str, Any] = {"family": "llama", "num_kv_heads": 1, "hidden_dropout": 0.1, "attention_dropout": 0.1}
"""Rotary positions, and a key head that all queries share, with both dropouts."""
ATTENTION: dict[str, Any] = {
    "attention_bias": "qkv",
    "attention_scale": 0.7,
    "attention_softcap": 1.5,
    "attention_sinks": True,
    "qk_norm": True,
    "qk_norm_scope": "width",
    "qkv_clip": 1.2,
    "attention_scale_beta": 0.5,
    "rope_original_length": 3,
}
DOCUMENTS: dict[str, Any] = {"reset_attention_mask": True, "reset_position_ids": True}
PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT: dict[str, Any] = {"family": "bert"}
"""Padded samples; tokens attend to all others, and one head reads the first token, another masked ones."""

# (mesh, model, what does not change the numbers)
CASES: list[Any] = [
    pytest.param(
        "data=1,context=4,model=2",
        {},
        {"recompute": "selective", "sequence_parallel": True, "microbatch_size": 2},
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "data=2,context=2,model=2",
        LLAMA | DOCUMENTS,
        {"recompute": "full", "sequence_parallel": True, "microbatch_size": 1, "zero": 3},
        marks=pytest.mark.exhaustive,  # a pattern's attention has documents on a ring: families/hybrid/test_model.py
    ),
    pytest.param(
        "data=2,context=2,model=2",
        LLAMA | DOCUMENTS | ATTENTION,
        {"context_method": "all-gather", "zero": 2, "microbatch_size": 2},
        marks=pytest.mark.long,
    ),
    pytest.param("data=1,context=2,model=1", {}, {"recompute": "full", "zero": 1}, marks=pytest.mark.exhaustive),
    pytest.param(
        "data=1,context=2,model=2",
        {"family": "llama", "q_lora_rank": 28, **LATENT, **PLAIN},
        {"recompute": "full", "sequence_parallel": True, "zero": 3},
        marks=pytest.mark.long,
    ),
    pytest.param(
        "data=1,context=4,model=2",
        BERT | PLAIN,
        {"recompute": "full", "sequence_parallel": True, "microbatch_size": 2, "zero": 2},
        marks=pytest.mark.long,
    ),
    pytest.param(
        "data=1,stage=2,context=2,model=1",
        BERT | PLAIN,
        {"context_method": "all-gather", "microbatch_size": 2},
        marks=pytest.mark.exhaustive,
    ),
]
PRODUCT = [
    pytest.param(
        mesh,
        model,
        {
            "context_method": method,
            "recompute": recompute,
            "zero": zero,
            "sequence_parallel": split,
            "microbatch_size": 1 if recompute == "full" else None,
        },
        marks=pytest.mark.exhaustive,
    )
    for mesh, model, method, (recompute, zero), split in itertools.product(
        ("data=1,context=2,model=1", "data=1,context=4,model=2", "data=2,context=2,model=2"),
        ({}, DOCUMENTS, LLAMA, LLAMA | DOCUMENTS, BERT),
        ("ring", "all-gather"),
        (("none", 0), ("selective", 1), ("full", 2), ("none", 3), ("full", 3)),
        (False, True),
    )
]


def results(program):
    """Losses and norms of two steps with dropout, the moments after the first, in which all gradients are, and the
    losses of a batch without dropout."""
    state, batch = initial_state(program), batch_of(program, 0)
    evaluated = program.evaluation(state.parameters, batch).values()
    state, first = run_steps(program, 1, state)
    moments = {name: a for name, a in by_name(program, state.optimizer).items() if MOMENT in name}
    _, second = run_steps(program, 1, state)
    return moments | {
        "evaluated": np.asarray([total / count for total, count in evaluated]),
        "steps": np.array([[m["loss"], m["grad_norm"]] for m in first + second]),
    }


@cache
def one_device(model):
    return results(program_of("1x1", **dict(model)))


@pytest.mark.parametrize(("mesh", "model", "settings"), [*CASES, *PRODUCT])
def test_losses_and_gradients_are_those_of_one_device(mesh, model, settings, monkeypatch):
    """In float32; where layers are computed again the kernel takes a few queries at a time."""
    if settings.get("recompute") == "full":
        monkeypatch.setattr(blocks, "QUERIES_AT_A_TIME", 3)
    known = one_device(tuple(model.items()))
    program = program_of(mesh, **model, **settings)
    found = results(program)
    for name, value in known.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5 * np.abs(value).max(), err_msg=name)
    assert_same(program, program_of("1x1", **model))


@pytest.mark.exhaustive
def test_a_state_goes_on_without_context():
    """Two steps on ranks that share samples, and two more on one device, as if all four were there: that the states
    after a step are alike is in each case above."""
    program, alone = program_of("data=1,context=2,model=1", recompute="full", zero=1), program_of("1x1")
    state, _ = run_steps(program, 2)
    moved = jax.tree.map(lambda a, like: jax.device_put(np.asarray(a), like.sharding), state, alone.abstract_state)
    _, losses = run_steps(alone, 2, moved)
    _, known = run_steps(alone, 4)
    np.testing.assert_allclose([m["loss"] for m in losses], [m["loss"] for m in known[2:]], rtol=1e-5)
