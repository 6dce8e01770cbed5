"""Stages of a pipeline: the same losses and gradients as one device, whatever the schedule, layout and family."""

import itertools
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.commands.convert import main as convert
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, fingerprints
from mtjax.runtime.checkpoints.weights import check_same_weights, find_weights, restore_weights
from mtjax.train.step import TrainStep
from tests.same_numbers import assert_same, by_name
from tests.tiny import LATENT, batch_of, program_of, run_steps

MODEL = (
    "family",
    "num_layers",
    "num_decoder_layers",
    "num_kv_heads",
    "tie_embeddings",
    "global_batch_size",
    "norm_placement",
    *("norm_weight", "norm_bias", "embedding_scale", "embedding_norm", "parallel_residual", "residual_scale"),
    *("output_scale", "output_softcap", "output_bias"),
    "hidden_dropout",
    "attention_dropout",
    *LATENT,
)
"""Settings that the model on one device has too; the rest is how it is spread."""

PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Without masks stages compile in less than half the time: the first case has those of hidden states."""

# mesh, settings: every schedule, layout and ZeRO stage is in one of them, one section and two, inputs and residuals
# kept; layers are unequal, microbatches no multiple of the stages, outputs untied. Two cases each are of one model, for
# which one device's program is compiled once.
COVERING: list[tuple[str, dict[str, Any]]] = [
    ("2x2x2", {"recompute": "full", "zero": 1, "num_layers": 5, "layers_per_stage": (2, 3), "attention_dropout": 0.0}),
    (
        "2x2x2",
        {"recompute": "none", "sequence_parallel": True, "zero": 3, "num_layers": 5, "layers_per_stage": (3, 2)}
        | PLAIN,
    ),
    (
        "1x4x2",
        {"recompute": "full", "sequence_parallel": True, "pipeline_schedule": "interleaved", "chunks": 2}
        | {"num_layers": 8, "global_batch_size": 6, "tie_embeddings": False, **PLAIN},
    ),
    (
        "2x4x1",
        {"recompute": "full", "pipeline_schedule": "gpipe", "zero": 2}
        | {"num_layers": 8, "global_batch_size": 6, "tie_embeddings": False, **PLAIN},
    ),
    ("1x2x2", {"recompute": "full", "family": "t5", "num_layers": 2, "num_decoder_layers": 2, **PLAIN}),
]
STRUCTURE = {"norm_bias": False, "embedding_scale": 3.0, "embedding_norm": True, "residual_scale": 0.5}
STRUCTURE |= {"output_scale": 0.5, "output_softcap": 2.0, "output_bias": True}
COVERING.append(("2x2x2", {"recompute": "full", "norm_placement": "sandwich", "zero": 3, **STRUCTURE, **PLAIN}))
LONG: list[tuple[str, dict[str, Any]]] = [
    (
        "1x2x2",
        {"recompute": "selective", "pipeline_schedule": "interleaved", "chunks": 2, "sequence_parallel": True, **PLAIN},
    ),
    ("2x2x2", {"recompute": "none", "family": "bert", "sequence_parallel": True, "norm_placement": "post", **PLAIN}),
    ("2x2x2", {"recompute": "none", "parallel_residual": "one_norm", "sequence_parallel": True, **STRUCTURE, **PLAIN}),
    ("1x2x2", {"recompute": "none", "family": "t5", "sequence_parallel": True, "zero": 0, **PLAIN}),
    (
        "2x2x2",
        {"recompute": "full", "family": "t5", "pipeline_schedule": "interleaved", "chunks": 2, "zero": 3, **PLAIN},
    ),
    (
        "2x2x2",
        {"recompute": "full", "family": "llama", "sequence_parallel": True, "zero": 2, "num_kv_heads": 2, **PLAIN},
    ),
    ("2x2x2", {"recompute": "full", "family": "llama", "sequence_parallel": True, "zero": 1, **LATENT, **PLAIN}),
    ("1x4x2", {"recompute": "none", "num_layers": 9, "layers_per_stage": (2, 3, 3, 1), "global_batch_size": 5}),
    ("data=1,stage=2,context=2,model=2", {"recompute": "full", "sequence_parallel": True, "zero": 1, **PLAIN}),
]
RARE: list[tuple[str, dict[str, Any]]] = [
    ("1x2x2", {"recompute": "full", "family": "t5", "num_layers": 2, "num_decoder_layers": 2}),
    ("2x2x2", {"recompute": "full", "zero": 1, "tie_embeddings": False}),
]
SELDOM = (COVERING[0], COVERING[4], LONG[2], LONG[3], LONG[5], LONG[7], LONG[8])
"""Each of their settings is in another case; masks, and stages that share samples, in families/gpt/test_llama.py."""
SCHEDULES = ({}, {"pipeline_schedule": "gpipe"}, {"pipeline_schedule": "interleaved", "chunks": 2})
CONTEXT = [
    (mesh, {"recompute": kept, "context_method": method, "zero": zero, **schedule})
    for mesh, kept, (method, zero), schedule in itertools.product(
        ("data=1,stage=2,context=2,model=2", "data=2,stage=2,context=2,model=1"),
        ("none", "selective", "full"),
        (("ring", 0), ("all-gather", 3)),
        SCHEDULES,
    )
]
PRODUCT = [
    (mesh, {"family": family, "recompute": kept, "sequence_parallel": split, "zero": zero, **schedule})
    for family, mesh, kept, split, zero, schedule in itertools.product(
        ("gpt", "bert", "t5"), ("2x2x2", "1x2x4"), ("none", "full"), (False, True), (0, 1, 2, 3), SCHEDULES
    )
]
CASES = [
    # Of the second case `test_steps_and_evaluation_on_stages` compares gradients, too: with whole steps.
    pytest.param(*COVERING[1], marks=pytest.mark.exhaustive),
    *COVERING[2:4],
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive if case in SELDOM else pytest.mark.long)
        for case in (COVERING[0], *COVERING[4:], *LONG)
    ),
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in RARE + PRODUCT + CONTEXT),
]


def staged(mesh: str, fields: dict[str, Any]) -> TrainStep:
    return program_of(mesh, **({"num_layers": 4, "microbatch_size": 1} | fields))


def alone(fields: dict[str, Any]) -> TrainStep:
    return program_of("1x1", **({"num_layers": 4} | {name: fields[name] for name in MODEL if name in fields}))


@cache
def losses_and_gradients(program: TrainStep) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The loss of the first batch, gradients, and initial parameters."""
    state = program.initialize(0)
    key = jax.random.wrap_key_data(state.random)
    loss, _, gradients = program.on_mesh(jax.jit(program.gradients), state.parameters, batch_of(program, 0), key)
    return float(loss), by_name(program, gradients), by_name(program, state.parameters)


@pytest.mark.parametrize(("mesh", "fields"), CASES)
def test_stages_change_nothing(mesh, fields):
    """The initial parameters, the loss and each gradient are those of one device that takes the batch in one piece."""
    loss, gradients, parameters = losses_and_gradients(staged(mesh, fields))
    expected_loss, expected, initial = losses_and_gradients(alone(fields))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for name, known in expected.items():
        np.testing.assert_allclose(parameters[name], initial[name], rtol=1e-6, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(gradients[name], known, rtol=0, atol=1e-5 * np.abs(known).max(), err_msg=name)


def test_steps_and_evaluation_on_stages():
    """Whole steps - the norm over all stages, the optimizer, what ZeRO gathers - and a forward pass alone. Where a
    stage has fewer layers than others, nothing is learned, and nothing counts."""
    program, one = staged(*COVERING[1]), alone(COVERING[1][1])
    (state, found), (expected_state, expected) = run_steps(program, 3), run_steps(one, 3)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in found], [m["grad_norm"] for m in expected], rtol=1e-5)
    (loss, weight), (known, same) = (
        p.evaluation(s.parameters, batch_of(p, 9))["loss"] for p, s in ((program, state), (one, expected_state))
    )
    np.testing.assert_allclose((loss, weight), (known, same), rtol=1e-5)
    assert_same(program, one)
    (order,) = program.layer_orders.values()
    padding = [place for place, number in enumerate(order.flat) if number < 0]
    assert len(padding) == 1
    for tree in (state.parameters, state.optimizer):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if "layers" in jax.tree_util.keystr(path):
                assert not np.asarray(leaf)[padding].any()


def test_a_checkpoint_of_stages_resumes_on_any_mesh(tmp_path):
    """Every array bit for bit, whatever the order of layers, and as weights; on the same mesh also the next step."""
    program = staged(*COVERING[1])
    state, _ = run_steps(program, 2)
    saved = fingerprints(state, program.layer_orders)
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(state, program.config, 16)
    checkpoints.close()
    going_on = run_steps(program, 1, state)[1]
    other_stages = staged("2x2x2", {**COVERING[1][1], "layers_per_stage": (2, 3)})
    restored = None
    for other in (program_of("2x4", num_layers=5, **PLAIN), other_stages, program):
        restored = Checkpoints(tmp_path, keep_last=1).restore(other.abstract_state, other.config)
        assert restored is not None and fingerprints(restored.state, other.layer_orders) == saved
        weights = find_weights(tmp_path)
        check_same_weights(weights, other.abstract_parameters, other.config, other.layer_orders)
        parameters = by_name(other, restore_weights(weights, other.restore_target, other.layer_orders))
        for name, known in by_name(other, restored.state.parameters).items():
            np.testing.assert_array_equal(parameters[name], known, err_msg=name)
    assert restored is not None and run_steps(program, 1, restored.state)[1] == going_on


@pytest.mark.parametrize("case", [1, 2], ids=["unequal", "interleaved"])
def test_a_checkpoint_of_stages_is_converted_layer_by_layer(tmp_path, case):
    """Layers that lie as the stages have them, some places empty, are written in their own order."""
    program = staged(*COVERING[case])
    state = program.initialize(0)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=1)
    checkpoints.save(state, program.config, 0)
    checkpoints.close()
    assert convert(["--from", f"mtjax:{tmp_path / 'run'}", "--to", f"mtjax:{tmp_path / 'converted'}"]) == 0
    written = find_weights(tmp_path / "converted")
    expected = {name: a for name, a in by_name(program, state.parameters).items() if ".layers." in name}
    assert program.layer_orders and expected.keys() <= set(written.names)
    for name, known in expected.items():
        np.testing.assert_array_equal(written.open(name).read().result(), known, err_msg=name)


@pytest.mark.long
def test_an_overflow_on_one_stage_skips_the_step_on_all():
    """float16: the scale is much too large, so that gradients overflow; parameters stay, and the scale shrinks."""
    fields = {**COVERING[0][1], **PLAIN, "compute_dtype": "float16", "initial_loss_scale": 2.0**40, "hysteresis": 1}
    program = staged("2x2x2", fields)
    before = program.initialize(0)
    kept = fingerprints(before)
    state, (metrics,) = run_steps(program, 1, before)
    after = fingerprints(state)
    assert metrics["skipped"] == 1 and metrics["loss_scale"] == 2.0**40
    assert state.loss_scale is not None and float(state.loss_scale.scale) == 2.0**39
    assert all(after[name] == number for name, number in kept.items() if name.startswith(("parameters", "optimizer")))
