"""Saved on one mesh, restored on any; a damaged one never passes for whole."""

import errno
import gc
import json
import os
import random
import shutil
import tempfile
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mtjax.config import replace, to_dict
from mtjax.errors import UserError
from mtjax.runtime.checkpoints import checkpoint
from mtjax.runtime.checkpoints import corruption as damage
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, check_same_model, fingerprints
from mtjax.runtime.checkpoints.past import newest_past
from mtjax.runtime.checkpoints.saves import Saves, obstacle
from tests.tiny import program_of, run_steps, tiny_config

CONSUMED = 24


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new():
    """What other tests hold is not searched again: that takes the collector a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """What a failed read leaves suspended raises where the collector finds it: let that be the test that left it."""
    yield
    gc.collect()


def flat(state):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 2 and 3 on 2x4; the folder, and the states that were saved."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    program = program_of("2x4")
    checkpoints = Checkpoints(folder, keep_last=3)
    state, states = None, {}
    for step in (2, 3):
        state, _ = run_steps(program, step - (int(state.step) if state else 0), state)
        states[step] = flat(state)
        checkpoints.save(state, program.config, CONSUMED + step)
    checkpoints.close()
    return folder, states


def copy_of(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


def restore(folder, mesh="2x4", **fields):
    program = program_of(mesh, **fields)
    checkpoints = Checkpoints(folder, keep_last=3)
    try:
        return checkpoints.restore(program.abstract_state, program.config)
    finally:
        checkpoints.close()


def same(state, expected):
    found = flat(state)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("mesh", ["2x4", "4x2", "8x1", "1x1"])
def test_any_mesh_restores_every_bit(saved, mesh):
    restored = restore(saved[0], mesh)
    assert (restored.step, restored.consumed_samples, restored.skipped) == (3, CONSUMED + 3, ())
    same(restored.state, saved[1][3])
    sharding = program_of(mesh).state_sharding.parameters["embedding"]
    assert restored.state.parameters["embedding"].sharding == sharding


@pytest.mark.parametrize(
    ("mesh", "fields"),
    [("4x2", {"zero": 3, "sequence_parallel": True}), ("data=2,shard=4,model=1", {"zero": 1})],
)
def test_any_layout_restores_every_bit_of_any_other(saved, tmp_path, mesh, fields):
    there = restore(saved[0], mesh, **fields)
    same(there.state, saved[1][3])
    program = program_of(mesh, **fields)
    assert there.state.optimizer[1][0].mu["embedding"].sharding.spec == program.records["embedding"].storage_spec
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.save(there.state, program.config, CONSUMED + 3)
    checkpoints.close()
    same(restore(tmp_path / "checkpoints", "1x1").state, saved[1][3])


def test_going_on_is_as_if_never_stopped(saved):
    program = program_of("2x4")
    expected = run_steps(program, 6)[1][3:]
    assert run_steps(program, 3, restore(saved[0]).state)[1] == expected


def test_saving_does_not_disturb_the_steps_that_follow(tmp_path):
    """Steps donate the very arrays that are being written."""
    program, folder = program_of("2x4"), tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep_last=10)
    state, states = program.initialize(0), {}
    for step in range(1, 6):
        state, _ = run_steps(program, 1, state)
        states[step] = flat(state)
        checkpoints.save(state, program.config, step)
    checkpoints.close()
    for step in (5, 4, 3, 2, 1):
        restored = restore(folder)
        assert restored.step == step
        same(restored.state, states[step])
        shutil.rmtree(folder / str(step))


def test_last_ones_and_every_kth_are_kept(tmp_path):
    program = program_of("1x1")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=2, keep_every=3)
    state = program.initialize(0)
    for step in range(1, 8):
        state, _ = run_steps(program, 1, state)
        checkpoints.save(state, program.config, step)
    checkpoints.close()
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == [3, 6, 7]


def test_nothing_to_restore_is_none(tmp_path):
    assert restore(tmp_path / "checkpoints") is None


def test_a_folder_that_vanishes_before_a_save_is_said_at_once(saved, tmp_path):
    """Orbax can make folders while it writes; its writers then wait five minutes for one that can't be made."""
    folder, program = tmp_path / "checkpoints", program_of("2x4")
    checkpoints = Checkpoints(folder, keep_last=1)
    folder.rmdir()
    folder.write_bytes(b"what is in the way")
    state, _ = run_steps(program, 1)
    start = time.monotonic()
    with pytest.raises(OSError, match="Not a directory"):
        checkpoints.save(state, program.config, CONSUMED)
        checkpoints.wait()
    assert time.monotonic() - start < 100


def test_a_folder_that_is_another_one_under_its_name_fails_a_save(tmp_path):
    """A disk is gone while a checkpoint is written, and Orbax makes the folder again, on the disk below."""
    folder, program = tmp_path / "checkpoints", program_of("2x4")
    checkpoints, said = Checkpoints(folder, keep_last=9), []
    saves = Saves(checkpoints, 1, advice=lambda: "mtjax train --resume", say=said.append)
    state, _ = run_steps(program, 1)
    saves.save(state, program.config, CONSUMED)
    checkpoints.wait()
    folder.rename(tmp_path / "gone")
    folder.mkdir()
    saves.finish()
    assert "step 1 could not be saved" in said[0] and "its disk is gone, or it was moved" in said[0]
    state, _ = run_steps(program, 1, state)
    with pytest.raises(UserError, match="step 2 could not be saved: .*its disk is gone.*no checkpoint is visible"):
        saves.save(state, program.config, CONSUMED)
    assert not list(folder.iterdir())


def data_files(step_folder):
    """Files with content, the largest first."""
    found = [p for p in step_folder.rglob("*") if p.is_file() and p.stat().st_size > 0]
    return sorted(found, key=lambda p: -p.stat().st_size)


def passed_over(folder, expected, caplog):
    restored = restore(folder)
    assert restored.step == 2 and len(restored.skipped) == 1
    assert f"{folder / '3'} is corrupted" in caplog.text
    same(restored.state, expected[2])
    assert not (folder / "3").exists() and (folder / "damaged-3").exists()


def test_half_written_is_passed_over(saved, tmp_path, caplog):
    folder = copy_of(saved, tmp_path)
    for path in (folder / "3" / "state").rglob("d/*"):
        path.unlink()
    passed_over(folder, saved[1], caplog)


def test_a_write_that_was_cut_off_is_not_a_checkpoint(saved, tmp_path):
    """What a kill leaves behind before the final rename."""
    folder = copy_of(saved, tmp_path)
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    assert restore(folder).step == 2


@pytest.mark.parametrize("which", [0, 1])
def test_truncated_is_passed_over(saved, tmp_path, caplog, which):
    folder = copy_of(saved, tmp_path)
    path = data_files(folder / "3" / "state")[which]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if which == 0:
        passed_over(folder, saved[1], caplog)
        return
    restored = restore(folder)  # Orbax may have left a second copy of a process's arrays, which nobody reads
    assert restored.step in (2, 3)
    same(restored.state, saved[1][restored.step])


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bit_is_passed_over_or_harmless(saved, tmp_path, caplog, seed):
    """A bit of the arrays' own files, anywhere: the state that comes back is one that was saved, to the bit."""
    folder, dice = copy_of(saved, tmp_path), random.Random(seed)
    path = dice.choice(data_files(folder / "3" / "state")[:4])
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    restored = restore(folder)
    assert restored.step in (2, 3)
    same(restored.state, saved[1][restored.step])


def test_page_of_metadata_is_checked(saved, tmp_path, caplog):
    folder = copy_of(saved, tmp_path)
    page = folder / "3" / "page" / "metadata"
    content = json.loads(page.read_text())
    content["consumed_samples"] += 1
    page.write_text(json.dumps(content))
    passed_over(folder, saved[1], caplog)


@pytest.mark.parametrize("lost", ["page/metadata", "page"])
def test_a_checkpoint_without_its_page_is_passed_over(saved, tmp_path, caplog, lost):
    folder = copy_of(saved, tmp_path)
    path = folder / "3" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert newest_past(folder).step == 2
    restored = restore(folder)
    assert (restored.step, restored.consumed_samples) == (2, CONSUMED + 2)
    assert "its metadata is missing" in caplog.text
    assert (folder / "damaged-3").is_dir()


@pytest.mark.parametrize("read", [restore, newest_past])
def test_a_page_of_another_version_is_refused_by_name(saved, tmp_path, read):
    folder = copy_of(saved, tmp_path)
    path = folder / "3/page/metadata"
    page = json.loads(path.read_text()) | {"version": 2}
    del page["checksum"]
    path.write_text(json.dumps(damage.with_checksum(page)))
    with pytest.raises(
        UserError, match=r"checkpoints/3 has format version 2, and this version of mtjax reads version 1: use"
    ):
        read(folder)
    assert (folder / "3").is_dir()  # a newer mtjax can use it


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(saved, tmp_path):
    """In two ways, and nothing is renamed: who cleans up may still find what went wrong."""
    folder = copy_of(saved, tmp_path)
    page = folder / "3" / "page" / "metadata"
    page.write_bytes(page.read_bytes()[:100])
    (folder / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    before = listing(folder)
    with pytest.raises(
        UserError, match=r"all checkpoints in \S+ are corrupted \(3: its metadata .* not what was .*; 2: DATA"
    ):
        restore(folder)
    assert listing(folder) == before
    for step in ("2", "3"):
        (folder / step).rename(folder / f"damaged-{step}")
    with pytest.raises(
        UserError, match=r"are corrupted \(damaged-2, damaged-3\), and nothing was changed: restore a good"
    ):
        restore(folder)


def listing(folder):
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def of_another_user(path):
    path.chmod(0o600 if os.geteuid() == 0 else 0)


def a_broken_disk(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, and reading its beginning is an input/output error


def a_folder(path):
    path.unlink()
    path.mkdir()


@contextmanager
def as_another_user():
    """Without the rights of root, who may read everything."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize(
    ("spoil", "path", "cause"),
    [
        (of_another_user, "state/manifest.ocdbt", "Permission denied"),
        (of_another_user, "page/metadata", "Permission denied"),
        (a_broken_disk, "state/d/*", "Input/output error"),
        (a_broken_disk, "page/metadata", "Input/output error"),
        (a_folder, "page/metadata", "Is a directory"),
    ],
)
def test_what_only_can_not_be_read_stays_where_it_is(saved, spoil, path, cause):
    """To TensorStore and Orbax most of these look like damage, or like nothing at all."""
    with tempfile.TemporaryDirectory() as temporary:  # pytest's own folders are closed to other users
        Path(temporary).chmod(0o755)
        folder = copy_of(saved, Path(temporary))
        spoilt = next((folder / "3").glob(path))
        spoil(spoilt)
        before = listing(folder)
        user = as_another_user() if spoil is of_another_user else nullcontext()
        with user, pytest.raises(UserError) as refused:
            restore(folder)
        assert f"checkpoint {folder / '3'} can't be read: {spoilt}: {cause}; nothing was changed" in str(refused.value)
        assert listing(folder) == before


@pytest.mark.parametrize("error", [MemoryError("no memory for 8 GB"), TimeoutError("timed out"), ValueError("odd")])
def test_what_went_wrong_outside_of_the_files_is_no_damage(saved, tmp_path, monkeypatch, error):
    folder = copy_of(saved, tmp_path)
    before = listing(folder)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ocp.CheckpointManager, "restore", fail)
    with pytest.raises(UserError, match=f"checkpoint {folder / '3'} can't be read: {error}; nothing was changed"):
        restore(folder)
    assert listing(folder) == before


def test_what_is_damaged_only_the_first_time_is_not(saved, monkeypatch):
    real, calls = damage.read_metadata, []

    def fail_once(folder):
        calls.append(folder)
        if len(calls) == 1:
            raise damage.CorruptedCheckpoint("a bit flipped on the way")
        return real(folder)

    monkeypatch.setattr(checkpoint, "read_metadata", fail_once)
    assert restore(saved[0]).step == 3
    assert calls == [saved[0] / "3"] * 2


def test_a_state_with_other_arrays_is_refused_and_not_damaged(saved):
    """float16 keeps its loss scale in the state."""
    before = listing(saved[0])
    with pytest.raises(UserError, match=r"/3 lacks loss_scale\S+, which this run has: resume with the settings"):
        restore(saved[0], compute_dtype="float16")
    assert listing(saved[0]) == before


def test_a_folder_that_can_not_be_listed_is_an_error(saved, tmp_path, monkeypatch):
    folder = copy_of(saved, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/checkpoints can't be used for checkpoints: .*Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", keep_last=1)
    checkpoints = Checkpoints(folder, keep_last=1)

    def stale(self):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self))

    monkeypatch.setattr(Path, "iterdir", stale)
    with pytest.raises(UserError, match=f"^{folder} can't be read: {folder}: Stale file handle; nothing was changed"):
        checkpoints.restore(None, None)
    checkpoints.close()


def test_step_of_a_damaged_one_can_be_saved_again(saved, tmp_path):
    folder, program = copy_of(saved, tmp_path), program_of("2x4")
    (folder / "3" / "page" / "metadata").write_text("{}")
    checkpoints = Checkpoints(folder, keep_last=3)
    restored = checkpoints.restore(program.abstract_state, program.config)
    state, _ = run_steps(program, 1, restored.state)
    checkpoints.save(state, program.config, CONSUMED)
    checkpoints.close()
    again = restore(folder)
    assert again.step == 3
    same(again.state, saved[1][3])


def test_another_model_is_refused_by_its_fields(saved):
    program = program_of("2x4")
    checkpoints = Checkpoints(saved[0], keep_last=3)
    other = replace(program.config, hidden_size=64, num_layers=3)
    with pytest.raises(UserError, match="num_layers is 2 there and 3 here; hidden_size is 32 there and 64 here"):
        checkpoints.restore(program.abstract_state, other)
    checkpoints.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_factor": 4.0}, "rope_factor is 8.0 there and 4.0 here"),
        ({"rope_original_length": 4096}, "rope_original_length is 8192 there and 4096 here"),
        ({"norm_epsilon": 1e-6}, "norm_epsilon is 1e-05 there and 1e-06 here"),
    ],
)
def test_what_no_shape_shows_is_refused_too(settings, message):
    """These change what the model computes, and no array."""
    llama = tiny_config(family="llama", rope_scaling="llama3")
    saved_config = to_dict(llama)
    check_same_model(saved_config, replace(llama, attention="xla", hidden_dropout=0.1), "checkpoint 3")
    with pytest.raises(
        UserError, match=f"^checkpoint 3 is of another model: {message}. Resume with .* in another --out$"
    ):
        check_same_model(saved_config, replace(llama, **settings), "checkpoint 3")


def test_fingerprints_see_a_bit_and_an_exchange_on_any_mesh():
    program = program_of("2x4")
    state = program.initialize(0)
    prints = fingerprints(state)
    assert prints == fingerprints(program_of("1x8").initialize(0))
    table = np.array(state.parameters["embedding"])

    def with_table(table):
        placed = jax.device_put(table, state.parameters["embedding"].sharding)
        parameters = state.parameters | {"embedding": placed}
        return fingerprints(type(state)(state.step, state.random, parameters, state.optimizer))

    flipped = table.copy()
    flipped.view(np.uint32)[17, 5] ^= 1
    exchanged = table.copy()
    exchanged[[3, 200]] = exchanged[[200, 3]]
    for other in (with_table(flipped), with_table(exchanged)):
        assert [name for name in prints if other[name] != prints[name]] == ["parameters.embedding"]


@pytest.mark.parametrize(("free", "fits"), [(1000, True), (999, False)])
def test_a_disk_needs_room_for_the_shards_of_all_processes(free, fits, tmp_path, monkeypatch):
    """Each of two processes has half of the state; they share the disk."""

    class Half:
        nbytes = 1000
        addressable_shards = (SimpleNamespace(replica_id=0, data=SimpleNamespace(nbytes=500)),)

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert (obstacle(tmp_path, SimpleNamespace(params=Half())) is None) == fits
