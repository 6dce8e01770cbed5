"""Silent corruption: one bit flipped on one device is found, and named, before anything is saved."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.runtime.checkpoints.checkpoint import names_of, state_arrays
from mtjax.runtime.train_state import State
from mtjax.train.observability.corruption_checks import CorruptionChecks
from mtjax.train.step import TrainStep
from tests.end_to_end.runs import Launcher
from tests.tiny import batch_of, initial_state, program_of

EMBEDDING, MOMENT = "parameters.embedding", "optimizer.1.0.nu.stack.layers.mlp.up.bias"


def flipped(state: State, name: str, device: int) -> State:
    """The state with one bit flipped in what one device has of an array."""
    leaves, structure = jax.tree.flatten(state_arrays(state))
    place = names_of(state_arrays(state)).index(name)
    copies = []
    for shard in leaves[place].addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.view(np.uint32).flat[data.size // 2] ^= 1 << 20
        copies.append(jax.device_put(data, shard.device))
    leaves[place] = jax.make_array_from_single_device_arrays(leaves[place].shape, leaves[place].sharding, copies)
    return State(**jax.tree.unflatten(structure, leaves))


def checked(mesh: str, **fields: Any) -> tuple[TrainStep, CorruptionChecks, State]:
    program = program_of(mesh, check_replicas=2, **fields)
    return program, CorruptionChecks(program), initial_state(program)


@pytest.mark.parametrize("name", [EMBEDDING, MOMENT, "step"])
def test_one_of_many_replicas_is_named(name: str) -> None:
    _, replicas, state = checked("4x2")
    replicas.check_state(1, state)
    with pytest.raises(UserError) as wrong:
        replicas.check_state(1, flipped(state, name, 5))
    assert str(wrong.value).startswith(
        f"at step 1 replicas differ from the majority on process 0, device 5: {name}; a device"
    )


def test_of_two_replicas_both_are_named() -> None:
    _, replicas, state = checked("2x4")
    with pytest.raises(
        UserError,
        match=f"replicas differ between process 0, device 1: {MOMENT}; process 0, device 5: {MOMENT};",
    ):
        replicas.check_state(1, flipped(state, MOMENT, 1))


def test_only_what_is_asked_for_is_checked() -> None:
    program, replicas, state = checked("2x4")
    replicas.check_step(3, flipped(state, EMBEDDING, 0), batch_of(program, 0))  # not a multiple of 2
    off = CorruptionChecks(program_of("2x4"))
    off.check_state(2, flipped(state, EMBEDDING, 0))


@pytest.mark.long
def test_on_stages_a_step_is_the_same_twice() -> None:
    program, replicas, state = checked("2x2x2", microbatch_size=1, attention_dropout=0.0)
    replicas.check_step(2, state, batch_of(program, 0))


@pytest.mark.long
def test_a_bit_that_flips_in_a_gradient_is_found_by_computing_it_twice() -> None:
    program, replicas, state = checked("4x2", zero=3, hidden_dropout=0.0, attention_dropout=0.0)
    batch = batch_of(program, 0)
    replicas.check_step(2, state, batch)
    turns = iter([replicas._compiled, faulty(program)])
    replicas.__dict__["_compiled"] = lambda *of: next(turns)(*of)
    differs = r"at step 2 two computations of the step differ on process 0, device 0: gradients\."
    with pytest.raises(UserError, match=differs):
        replicas.check_step(2, state, batch)


def faulty(program: TrainStep) -> Any:
    """The examined step of a program, in which one bit of a gradient is flipped."""

    class Faulty(TrainStep):
        def gradients(self, parameters: Any, batch: Any, key: Any, scale: Any = None) -> Any:
            loss, parts, gradients = super().gradients(parameters, batch, key, scale)
            leaves, structure = jax.tree.flatten(gradients)
            bits = jax.lax.bitcast_convert_type(leaves[-1], jnp.uint32) ^ jnp.uint32(1)
            leaves[-1] = jax.lax.bitcast_convert_type(bits, jnp.float32)
            return loss, parts, jax.tree.unflatten(structure, leaves)

    return CorruptionChecks(Faulty(program.config, program.mesh))._compiled


@pytest.mark.long
@pytest.mark.usefixtures("bare_end")
def test_a_run_ends_before_it_saves_what_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher.prepare(tmp_path)
    words = ["--checkpoint-every", "1", "--keep-last", "9", "--steps", "4"]
    plain, with_checks = (launcher.train_here(f"out{n}", *words, "--check-replicas", str(n)) for n in (0, 4))
    assert with_checks.losses == plain.losses
    assert with_checks.fingerprints(4) == plain.fingerprints(4)
    step = TrainStep.step

    def hit(self: TrainStep, state: State, batch: Any) -> Any:
        following, results = step(self, state, batch)
        return (flipped(following, EMBEDDING, 3) if int(following.step) == 3 else following), results

    monkeypatch.setattr(TrainStep, "step", hit)
    corrupt = launcher.run_here("corrupt", *words, "--check-replicas", "4")
    assert corrupt.code == 2
    assert "error: at step 3 replicas differ between process 0, device 3: " in corrupt.stderr
    assert corrupt.checkpoints == {1, 2}
