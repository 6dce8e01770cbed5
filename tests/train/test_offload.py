"""Moments in the host's memory: the same numbers, and checkpoints of runs with and without it."""

import dataclasses
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config import validate
from mtjax.errors import UserError
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.sharding.host_memory import DEVICE, PINNED, is_on_host
from mtjax.train.offload import check_offload, streamed_update
from tests.tiny import batch_of, initial_state, program_of, run_steps, step_gradients, tiny_config

SETTINGS: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_layers": 3, "family": "llama"}
SETTINGS |= {"num_kv_heads": 4, "mlp_size": 48}


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    paths = jax.tree_util.tree_leaves_with_path((state.parameters, state.optimizer))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}


def moments_are_on_host(state: Any) -> bool:
    adam = state.optimizer[1][0]
    others = (state.parameters, adam.count, state.step)
    assert not any(map(is_on_host, jax.tree.leaves(others)))
    return all(map(is_on_host, jax.tree.leaves((adam.mu, adam.nu))))


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        pytest.param("4x1", {"zero": 3, "microbatch_size": 1}, marks=pytest.mark.long),
        pytest.param("2x2", {"zero": 1}, marks=pytest.mark.long),
        pytest.param("data=2,expert=2", {"zero": 2, "num_experts": 4}, marks=pytest.mark.long),
    ],
)
def test_runs_and_checkpoints_with_and_without_offload(mesh: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The update of whole stacks rounds otherwise; a resumed run with offload is equal to the bit."""
    plain, offloaded = (program_of(mesh, offload=kind, **SETTINGS, **settings) for kind in ("none", "optimizer"))
    expected, losses = run_steps(plain, 4)
    first = offloaded.initialize(0)
    assert moments_are_on_host(first)
    assert not any(np.asarray(a).any() for a in jax.tree.leaves(first.optimizer))
    state, found = run_steps(offloaded, 2, first)
    assert moments_are_on_host(state)
    folder = tmp_path / "offloaded"
    with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
        checkpoints.save(state, offloaded.config, 16)
        state, rest = run_steps(offloaded, 2, state)  # while it is written
    for mine, theirs in zip([*found, *rest], losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for name, array in arrays_of(expected).items():
        np.testing.assert_allclose(arrays_of(state)[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    for reader, is_offloaded in ((offloaded, True), (plain, False)):
        with closing(Checkpoints(folder, keep_last=1)) as checkpoints:
            restored = checkpoints.restore(reader.abstract_state, reader.config)
        assert restored is not None and restored.skipped == ()
        assert moments_are_on_host(restored.state) == is_offloaded
        again, _ = run_steps(reader, 2, restored.state)
        for name, array in arrays_of(state).items():
            compare = np.testing.assert_array_equal if is_offloaded else partial(np.testing.assert_allclose, atol=1e-5)
            compare(arrays_of(again)[name], array, err_msg=name)


def test_the_copies_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same loop over layers with the moments on the device."""
    program = program_of("2x2", zero=1, offload="optimizer", **SETTINGS)
    state, plain = initial_state(program), program_of("2x2", zero=1, **SETTINGS)
    on_device = jax.tree.map(lambda a, s: jax.device_put(a, s), state.optimizer, plain.state_sharding.optimizer)
    batch = batch_of(program, 0)
    _, _, gradients = step_gradients(program, state, batch)

    def update(memory: Any, optimizer: Any) -> Any:
        def traced(gradients: Any, optimizer: Any, parameters: Any) -> Any:
            norm, finite = jax.numpy.float32(3.0), jax.numpy.bool_(True)
            return streamed_update(
                program.config, program.trainable_records, gradients, optimizer, parameters, finite, norm, **memory
            )

        return program.on_mesh(jax.jit(traced), gradients, optimizer, state.parameters)

    hosted, there = update({}, state.optimizer), update({"memory": DEVICE}, on_device)
    assert {a.sharding.memory_kind for a in jax.tree.leaves(hosted[1][1][0].mu)} == {PINNED}
    for mine, theirs in zip(jax.tree.leaves(hosted), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_a_skipped_step_moves_no_offloaded_state() -> None:
    program = program_of("2x2", zero=1, offload="optimizer", **SETTINGS)
    state = initial_state(program)
    bad = {**state.parameters, "embedding": state.parameters["embedding"] * np.inf}
    state = dataclasses.replace(state, parameters=bad)
    before = arrays_of(state)
    after, metrics = program.step(state, batch_of(program, 0))
    assert float(metrics["skipped"]) == 1.0
    for name, array in arrays_of(after).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "muon"}, "offload optimizer works with optimizer adamw only, and optimizer is muon"),
        ({"adam_mu_dtype": "bfloat16"}, "adam_mu_dtype float32 only, and adam_mu_dtype is bfloat16"),
        ({"check_replicas": 5}, "check_replicas 0 only, and check_replicas is 5"),
    ],
)
def test_what_can_not_be_offloaded_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(tiny_config(offload="optimizer", **settings))


def test_stages_are_refused() -> None:
    with pytest.raises(UserError, match="mesh 1x3x1 divides layers into pipeline stages"):
        check_offload(tiny_config(mesh="1x3x1", offload="optimizer", **SETTINGS), parse_mesh("1x3x1"))
