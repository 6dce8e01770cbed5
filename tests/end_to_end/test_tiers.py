"""Two processes with disks of their own, of which one is lost: the run goes on, to the bit, and says from where."""

import shutil
from pathlib import Path

import pytest

from mtjax.runtime.checkpoints.local import IDENTITY
from tests.end_to_end.runs import Finished, Launcher, ended, finish, free_port

pytestmark = pytest.mark.long


def train(launcher: Launcher, out: str, *options: str) -> Finished:
    """A run of two processes that must end well; what the first one says."""
    together = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--process-id"]
    tiers = ["--steps", "12", "--checkpoint-every", "6", "--local-every", "2", "--local-keep", "3"]
    words = [[*tiers, "--local-checkpoints", f"{out}-disk-{i}", *together, str(i), *options] for i in (0, 1)]
    with ended([launcher.start("--out", out, *own, bare=True) for own in words]) as started:
        finished = [finish(process, launcher.folder / out) for process in started]
    assert [f.code for f in finished] == [0, 0], [f.stderr for f in finished]
    return finished[0]


@pytest.fixture(scope="module")
def whole(launcher: Launcher) -> Finished:
    """12 steps without an interruption: 6 and 12 are in --out, 4, 8 and 10 on each disk."""
    whole = train(launcher, "whole")
    assert whole.checkpoints == {6, 12}
    for i in (0, 1):
        steps = {path.parent.name for path in (launcher.folder / f"whole-disk-{i}").glob(f"mtjax-*/*/process-{i}")}
        assert steps == {"4", "8", "10"}
    return whole


def interrupted(launcher: Launcher, name: str) -> Path:
    """A copy of the run as it was after step 11; what the second process has on its disk."""
    for suffix in ("", "-disk-0", "-disk-1"):
        shutil.copytree(launcher.folder / f"whole{suffix}", launcher.folder / f"{name}{suffix}")
    shutil.rmtree(launcher.folder / name / "checkpoints" / "12")
    identity = launcher.folder / name / IDENTITY  # of a run in its own folder: a copy would not read these disks
    identity.write_text(identity.read_text().replace(str(launcher.folder / "whole"), str(launcher.folder / name)))
    return next((launcher.folder / f"{name}-disk-1").glob("mtjax-*"))


def test_a_lost_disk_is_made_up_by_who_holds_the_same(launcher: Launcher, whole: Finished) -> None:
    """Each process has a data way of its own, with all parameters and moments."""
    shutil.rmtree(interrupted(launcher, "refilled"))
    resumed = train(launcher, "refilled", "--resume")
    assert "note    step 10 in refilled-disk-0/mtjax-" in resumed.stdout
    assert "lacks it: its shards are copied from processes that have replicas" in resumed.stdout
    assert "resumed from step 10 in refilled-disk-0/mtjax-" in resumed.stdout
    assert resumed.losses == whole.losses
    assert resumed.fingerprints(12) == whole.fingerprints(12)


def test_what_nobody_else_holds_is_taken_from_an_older_step(launcher: Launcher, whole: Finished) -> None:
    """On 1x8 each process needs the parameters of its own model ways. What is left on the disk is too old."""
    disk = interrupted(launcher, "fallen-back")
    for step in ("8", "10"):
        shutil.rmtree(disk / step)
    resumed = train(launcher, "fallen-back", "--resume", "--mesh", "1x8", "--steps", "8")
    for step in (10, 8):
        assert f"note    step {step} in fallen-back-disk-0/mtjax-" in resumed.stdout
    assert resumed.stdout.count("is not used: process 1 (") == 2
    assert "resumed from step 6 in fallen-back/checkpoints" in resumed.stdout
    for step in (7, 8):
        assert resumed.losses[step] == pytest.approx(whole.losses[step], rel=1e-5)
