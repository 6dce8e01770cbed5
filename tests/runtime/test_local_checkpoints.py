"""The tier on a machine's own disk: every bit comes back, or a sentence says why it is not taken."""

import dataclasses
import json
import shutil
import socket

import jax
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.runtime.checkpoints.corruption import metadata_checksum
from mtjax.runtime.checkpoints.local import LocalCheckpoints
from mtjax.sharding.restore_missing import have_all, restore_missing
from tests.runtime.test_checkpoint import flat, same
from tests.tiny import program_of, run_steps

MESH = "2x4"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Shared checkpoints of steps 1 and 4, local ones of 2, 3 and 5, of which the last two stay; and the states."""
    folder = tmp_path_factory.mktemp("tiers")
    program = program_of(MESH)
    shared, local = tiers(folder)
    state, states = program.initialize(0), {}
    for step in range(1, 6):
        state, _ = run_steps(program, 1, state)
        states[step] = flat(state)
        (shared if step in (1, 4) else local).save(state, program.config, 10 * step)
    shared.close()
    local.close()
    return folder, states


def tiers(folder):
    return Checkpoints(folder / "shared", keep_last=9), LocalCheckpoints(folder / "local", every=1, keep=2)


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "tiers")


def restore(folder, mesh=MESH, **fields):
    """What a restart takes, and what it says."""
    program, said = program_of(mesh, **fields), []
    shared, local = tiers(folder)

    def elsewhere(at_least):
        return local.newest(at_least, program.abstract_state, program.config, said.append)

    try:
        restored = shared.restore(program.abstract_state, program.config, elsewhere)
        if restored is not None:
            local.quarantine()
        return restored, said
    finally:
        shared.close()


def test_the_newest_of_both_tiers_is_taken_to_the_bit(saved, copied):
    local = copied / "local"
    assert sorted(path.name for path in local.iterdir()) == ["3", "5"]
    for step, place in ((5, local), (4, copied / "shared"), (3, local), (1, copied / "shared")):
        restored, said = restore(copied)
        assert (restored.step, restored.folder, restored.consumed_samples, said) == (step, place, 10 * step, [])
        same(restored.state, saved[1][step])
        shutil.rmtree(place / str(step))
    assert restore(copied) == (None, [])


def test_going_on_from_the_local_tier_is_as_if_never_stopped(copied):
    program = program_of(MESH)
    expected = run_steps(program, 7)[1][5:]
    assert run_steps(program, 2, restore(copied)[0].state)[1] == expected


@pytest.mark.parametrize("spoilt", ["state/parameters.embedding/c/0/0", "page/metadata"])
def test_a_damaged_copy_is_passed_over_and_set_aside(saved, copied, caplog, spoilt):
    path = copied / "local" / "5" / "process-0" / spoilt
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    restored, said = restore(copied)
    assert restored.step == 4
    assert [word[: word.index("(")] for word in said] == [
        f"note    step 5 in {copied / 'local'} is not used: process 0 "
    ]
    assert "has a corrupted one" in said[0]
    assert f"{copied / 'local/5/process-0'} is corrupted and skipped" in caplog.text
    assert (copied / "local/damaged-5-process-0").is_dir()


def test_a_missing_part_is_no_zero(copied):
    """What is not there reads as zeros."""
    next(
        path for path in (copied / "local/5/process-0/state/parameters.embedding/c").rglob("*") if path.is_file()
    ).unlink()
    restored, said = restore(copied)
    assert restored.step == 4
    assert "of parameters.embedding is missing)" in said[0]


def test_wrong_numbers_with_right_checksums_are_seen(saved, copied, caplog):
    """A part of another step in its place: only the fingerprint of the whole array knows."""
    name = "process-0/state/parameters.embedding"
    shutil.rmtree(copied / "local/5" / name)
    shutil.copytree(copied / "local/3" / name, copied / "local/5" / name)
    restored, said = restore(copied)
    assert restored.step == 4
    assert said[0].endswith("is not used: parameters.embedding is not what was saved")
    assert (copied / "local/damaged-5-process-0").is_dir()


def test_what_can_not_be_read_is_no_damage(copied):
    page = copied / "local/5/process-0/page/metadata"
    page.unlink()
    page.mkdir()
    with pytest.raises(UserError, match=r"local/5 on \S+ can't be read: .*/metadata: Is a directory; nothing was chan"):
        restore(copied)


def test_another_mesh_takes_what_one_copy_covers(saved, copied):
    """One process wrote all parts of all devices."""
    restored, said = restore(copied, "4x2")
    assert (restored.step, said) == (5, [])
    same(restored.state, saved[1][5])


def test_parts_of_other_devices_are_not_enough(copied):
    page_of = copied / "local/5/process-0/page/metadata"
    page = json.loads(page_of.read_text())
    del page["checksum"]
    page["pieces"]["parameters.embedding"]["starts"].pop()
    page_of.write_text(json.dumps(page | {"checksum": metadata_checksum(page)}))
    restored, said = restore(copied)
    assert restored.step == 4
    assert "has shards of other devices" in said[0]


def test_saving_goes_on_when_the_disk_fails(tmp_path, caplog):
    program = program_of(MESH)
    (tmp_path / "local").write_text("a file where the folder should be")
    local = LocalCheckpoints(tmp_path / "local", every=1, keep=2)
    local.save(program.initialize(0), program.config, 0)
    local.close()
    assert "the local checkpoint of step 0 was not saved (" in caplog.text


def test_an_abandoned_course_of_the_run_is_forgotten_once_its_steps_are_behind(tmp_path):
    program = program_of(MESH)
    local = LocalCheckpoints(tmp_path, every=2, keep=2)
    state = program.initialize(0)
    (tmp_path / "900" / "process-0").mkdir(parents=True)
    for number in (2, 4, 6):
        local.save(dataclasses.replace(state, step=state.step + number), program.config, 0)
    local.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]
    assert [step for step in range(1, 7) if local.is_due(step)] == [2, 4, 6]


@dataclasses.dataclass(frozen=True)
class Of:
    """A device of a made-up process."""

    process_index: int


def test_parts_come_from_who_holds_them():
    """Replicated over two data ways, so that either half of the devices is enough; split by ZeRO, all are needed."""
    state = program_of(MESH).initialize(0)
    arrays = [state.parameters["embedding"], state.step]
    assert have_all(arrays, {0})
    assert not have_all(arrays, set())
    for array in arrays:
        asked = []

        def part(index, array=array, asked=asked):
            asked.append(str(index))
            return np.asarray(array)[index]

        back = restore_missing(jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), part, {0})
        np.testing.assert_array_equal(np.asarray(back), np.asarray(array))
        assert back.sharding == array.sharding
        assert (
            len(asked)
            == len(set(asked))
            == len(set(map(str, array.sharding.devices_indices_map(array.shape).values())))
        )


def test_an_older_local_step_is_taken_where_it_is_newer_than_the_shared_ones(saved, copied):
    shutil.rmtree(copied / "shared/4")
    shutil.rmtree(copied / "local/5/process-0")
    restored, said = restore(copied)
    assert (restored.step, restored.folder) == (3, copied / "local")
    assert [word.partition(" is not used: ")[2] for word in said] == [f"process 0 ({socket.gethostname()}) lacks it"]
    same(restored.state, saved[1][3])
