"""float16: how the loss scale is counted, and what an overflow leaves alone."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Training, validate
from mtjax.errors import UserError
from mtjax.layout.plan import Plan
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.train.loss_scale import LossScale, update
from tests.tiny import batch_of, initial_state, program_of, run_steps, tiny_config

# finite, then scale, growth and hysteresis after it; window 3, hysteresis 2, minimum 2, from scale 16.
TRACE = [
    (True, 16, 1, 2),
    (False, 16, 0, 1),
    (True, 16, 1, 1),
    (False, 8, 0, 0),
    (False, 4, 0, -1),
    (True, 4, 1, -1),
    (True, 4, 2, -1),
    (True, 8, 0, 2),
    (False, 8, 0, 1),
    (False, 4, 0, 0),
    (False, 2, 0, -1),
    (False, 2, 0, -2),
]


PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
HALF = {"compute_dtype": "float16", "initial_loss_scale": 2.0**28, "hysteresis": 1, **PLAIN}
"""The first steps overflow."""
SHARED = "data=1,context=2,model=2"
"""Ranks share the tokens of samples."""


def test_the_scale_follows_a_trace_counted_by_hand():
    options = Training(compute_dtype="float16", loss_scale_window=3, min_loss_scale=2)
    state = LossScale(jnp.float32(16), jnp.int32(0), jnp.int32(2))
    for finite, *expected in TRACE:
        state = update(state, jnp.asarray(finite), options)
        assert [float(state.scale), int(state.growth), int(state.hysteresis)] == expected


def test_a_counter_that_has_passed_a_shorter_window_doubles_the_scale():
    """A run that resumes with a shorter loss_scale_window: with `==` its scale would never grow again."""
    options = Training(compute_dtype="float16", loss_scale_window=3)
    state = update(LossScale(jnp.float32(16), jnp.int32(7), jnp.int32(2)), jnp.asarray(True), options)
    assert [float(state.scale), int(state.growth)] == [32, 0]


def test_an_overflow_skips_its_step_on_every_replica_and_training_goes_on(tmp_path):
    program = program_of("2x4", **HALF)
    before = initial_state(program)
    kept = jax.device_get((before.parameters, before.optimizer))
    state, metrics = program.step(before, batch_of(program, 0))
    assert float(metrics["skipped"]) == 1 and float(metrics["grad_norm"]) == 0
    assert float(state.loss_scale.scale) == 2.0**27
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.parameters, state.optimizer)), kept)
    for leaf in jax.tree.leaves(state.parameters):
        by_place = {}
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(by_place.setdefault(str(shard.index), shard.data), shard.data)
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_every=None)
    checkpoints.save(state, program.config, 8)
    restored = checkpoints.restore(program.abstract_state, program.config)
    checkpoints.close()
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state), jax.device_get(state))
    ended, later = run_steps(program, 16, restored.state)
    assert later[-1]["skipped"] == 0
    good = sum(1 - int(m["skipped"]) for m in later)
    assert 0 < good < 16
    leaves = jax.tree_util.tree_leaves_with_path(ended.optimizer)
    counts = {int(leaf) for path, leaf in leaves if "count" in jax.tree_util.keystr(path)}
    assert counts == {good}
    assert later[-1]["learning_rate"] == float(program.learning_rate(good - 1))


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        ("2x4", HALF),
        pytest.param(SHARED, HALF, marks=pytest.mark.long),
        pytest.param(SHARED, {"compute_dtype": "bfloat16", **PLAIN}, marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_near_those_of_float32(mesh, fields):
    program = program_of(mesh, **fields)
    state = initial_state(program)
    if state.loss_scale is not None:
        state = replace(state, loss_scale=replace(state.loss_scale, scale=state.loss_scale.scale / 2**18))
    found = run_steps(program, 5, state)[1]
    expected = run_steps(program_of("1x1", **PLAIN), 5)[1]
    assert not any(m["skipped"] for m in found)
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=2e-3)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        pytest.param("2x4", {"zero": 3, "sequence_parallel": True, "microbatch_size": 1}, marks=pytest.mark.long),
        pytest.param(SHARED, {}, marks=pytest.mark.long),
    ],
)
def test_split_or_not_the_same_steps_are_skipped(mesh, layout):
    found = run_steps(program_of(mesh, **HALF, **layout), 12)[1]
    expected = run_steps(program_of("2x4", **HALF), 12)[1]
    assert [m["loss_scale"] for m in found] == [m["loss_scale"] for m in expected]
    assert found[0]["skipped"] == 1 and found[-1]["skipped"] == 0
    np.testing.assert_allclose([m["loss"] for m in found], [m["loss"] for m in expected], rtol=2e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_dtype": "float16", "loss_scale": 0.0}, "loss_scale is 0.0, and must be a finite number above 0"),
        ({"compute_dtype": "float16", "loss_scale_window": 0}, "loss_scale_window is 0, and must be"),
        ({"compute_dtype": "float16", "initial_loss_scale": 1.0, "min_loss_scale": 2.0}, "1 is below min_loss_scale 2"),
        (
            {"compute_dtype": "bfloat16", "loss_scale": 8.0},
            "only works with compute_dtype float16, and compute_dtype is bf",
        ),
    ],
)
def test_settings_that_scale_nothing_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**fields))


@pytest.mark.long
def test_a_pattern_with_prefetch_skips_the_steps_that_one_device_skips():
    """Also what an overflow leaves in the gradients of one layer only, which the layer below reduces."""
    letters = {"family": "hybrid", "layer_pattern": "(*-)x4", "num_layers": 8, "global_batch_size": 8} | HALF
    program = program_of("4x2", **letters, zero=3, microbatch_size=1)
    assert Plan.of(program.config, program.mesh_shape).prefetches(program.config.model)
    _, found = run_steps(program, 12)
    _, expected = run_steps(program_of("1x1", **letters), 12)
    assert [m["loss_scale"] for m in found] == [m["loss_scale"] for m in expected]
    assert found[0]["skipped"] == 1 and found[-1]["skipped"] == 0
    for metric, within in (("loss", 2e-3), ("grad_norm", 2e-2)):
        np.testing.assert_allclose([m[metric] for m in found], [m[metric] for m in expected], rtol=within)
