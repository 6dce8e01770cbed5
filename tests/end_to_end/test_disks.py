"""Disks that are full, can't be written to, or are gone: real file systems, small ones or ones that a fault takes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtjax.errors import UserError
from mtjax.train.folder.log_files import Events, Lines
from tests.end_to_end.runs import Launcher, ended, finish, look, wait_for_checkpoint

pytestmark = pytest.mark.usefixtures("bare_end")
STEPS = ("--steps", "6", "--checkpoint-every", "2")

LEFT_OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
"""A file that can't be written to the end can't be closed."""

Disk = Callable[[str], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Mounts a file system of a size, or gives the one that is mounted another size."""
    place = tmp_path / "disk"
    place.mkdir()

    def size(text: str) -> Path:
        what = f"remount,size={text}" if os.path.ismount(place) else f"size={text}"
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", what, "tmpfs", place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a small disk can't be mounted here: {done.stderr.strip()}")
        return place

    yield size
    subprocess.run(["umount", "-l", place], capture_output=True)


UNFORESEEN = """from mtjax.commands import train
from mtjax.runtime.checkpoints import saves
saves.obstacle = lambda *_: None
exit(train.main())"""
"""As when a disk gets full while a checkpoint is written."""


@pytest.mark.long
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_a_full_disk_costs_saves_and_then_the_run(is_foreseen: bool, launcher: Launcher, disk: Disk) -> None:
    """Foreseen, a save does not begin; otherwise TensorStore meets the full disk, in threads of its own."""
    out = str(disk("3m") / "run")
    if is_foreseen:
        full = launcher.run_here(out, *STEPS)
    else:
        words = launcher.command("--data", "text.txt", "--out", out, *STEPS)[3:]
        done = subprocess.run(
            [sys.executable, "-c", UNFORESEEN, *words], cwd=launcher.folder, capture_output=True, text=True
        )
        full = look(done.returncode, done.stdout, done.stderr, Path(out))
    assert full.code == 2
    assert full.checkpoints == {2}
    why = r"a checkpoint needs 1\.\d MB here, and \d\.\d MB are free" if is_foreseen else "No space left on device"
    assert full.stdout.count("step 4 could not be saved") == 1
    line, *more = (line for line in full.stderr.splitlines() if line and " (once; kept in" not in line)
    assert not more, full.stderr
    pattern = (
        rf"^error: step 6 could not be saved: .*{why}; the last good checkpoint is .*/2; fix this, and resume with"
    )
    assert re.search(pattern, line)
    disk("30m")
    again = launcher.train_here(out, *STEPS, "--resume")
    assert "resumed from step 2" in again.stdout
    assert [entry["step"] for entry in again.metrics] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in (full.out / "checkpoints").iterdir()} == {"2", "4", "6"}


@pytest.mark.long
def test_more_failed_saves_than_are_tolerated_end_the_run(launcher: Launcher) -> None:
    """A folder that nobody can write to, from the middle of a run on; root too."""
    out = launcher.folder / "immutable"
    options = ["--steps", "5000", "--checkpoint-every", "2", "--max-failed-saves", "1"]
    with ended([launcher.start("--out", "immutable", *options)]) as (process,):
        wait_for_checkpoint(out, 2, process)
        if subprocess.run(["chattr", "+i", out / "checkpoints"], capture_output=True).returncode:
            pytest.skip("no file can be made immutable here")
        try:
            run = finish(process, out)
        finally:
            subprocess.run(["chattr", "-i", out / "checkpoints"], check=True)
    assert run.code == 2, run.stderr
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("error: step ")
    assert "Operation not permitted; the last good checkpoint is" in line
    assert run.stdout.count("the run ends if more than 1 saves in a row fail") == 1
    left = [path.name for path in (out / "checkpoints").iterdir()]
    kept = sorted(int(name) for name in left if name.isdigit())
    assert launcher.train_here("immutable", "--steps", str(kept[-1] + 1), "--resume").code == 0


@pytest.mark.long
def test_a_folder_that_vanishes_ends_the_run(launcher: Launcher) -> None:
    out = launcher.folder / "vanishing"
    with ended([launcher.start("--out", "vanishing", "--steps", "5000", "--checkpoint-every", "2")]) as (process,):
        wait_for_checkpoint(out, 2, process)
        # One rename, as deleting file by file can leave what the run writes meanwhile.
        shutil.rmtree(out.rename(launcher.folder / "vanished"))
        stdout, stderr = process.communicate(timeout=300)
    run = look(process.returncode, stdout, stderr, out)
    assert run.code in (2, 75), stderr
    line = stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    # The first write after it misses its folder, or has made one anew.
    assert "No such file or directory" in line or "is not the folder in which this run started" in line
    assert "Traceback" not in stderr


@pytest.fixture
def real_disk(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Mounts a file system with a journal, ext4, which a fault makes read-only; each time the same one."""
    image, place = tmp_path / "image", tmp_path / "real"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)

    def mount() -> Path:
        subprocess.run(["umount", "-l", place], capture_output=True)
        done = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"only root can mount a disk, where there are loop devices: {done.stderr.strip()}")
        return place

    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    yield mount
    subprocess.run(["umount", "-l", place], capture_output=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(["mount", "-o", "remount,abort"], id="read-only"),
        pytest.param(["umount", "-l"], id="gone", marks=pytest.mark.exhaustive),
    ],
)
def test_a_disk_that_fails_under_a_run_costs_no_checkpoint(
    fault: list[str], launcher: Launcher, real_disk: Callable[[], Path]
) -> None:
    """As the kernel takes a disk away after an I/O error: files that are open can't be written any more."""
    out = real_disk() / "run"
    options = ["--steps", "100000", "--checkpoint-every", "2", "--keep-last", "1000", "--log-every", "1"]
    with ended([launcher.start("--out", str(out), *options)]) as (process,):
        wait_for_checkpoint(out, 2, process)
        subprocess.run(["sync", "-f", out], check=True)
        subprocess.run([*fault, out.parent], check=True)
        _, stderr = process.communicate(timeout=300)
    assert process.returncode in (2, 75), stderr
    assert "Traceback" not in stderr
    (line,) = (line for line in stderr.splitlines() if line.startswith("error: "))
    assert line == stderr.splitlines()[-1]
    assert re.search(
        "Read-only file system|No such file or directory|no longer held by this run|its disk is gone", line
    )
    real_disk()
    left = [int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit()]
    again = launcher.train_here(str(out), "--resume", "--steps", str(max(left) + 1))
    assert 2 in again.checkpoints
    assert "resumed from step" in again.stdout


@pytest.mark.long
@LEFT_OPEN
def test_data_are_prepared_on_a_full_disk(launcher: Launcher, disk: Disk) -> None:
    """Wherever the disk gets full, nothing is left that the next start would take for complete."""
    for size in ("4k", "16k", "32k", "48k"):
        place = disk(size)
        words = ["--cache-dir", str(place / "cache"), "--steps", "1"]
        full = launcher.run_here(f"prepared-{size}", *words)
        assert full.code == 2, size
        line = full.stderr.strip().splitlines()[-1]
        assert line.startswith("error: ")
        assert "while preparing data in the cache" in line
        assert "Traceback" not in full.stderr
        assert not full.out.exists()
        left = [path.name for path in place.glob("cache/*") if not path.name.startswith(".")]
        assert all((place / "cache" / name / "made_from.json").stat().st_size for name in left)
        assert not list(place.glob("cache/.*.tmp"))
    disk("30m")
    assert launcher.train_here("prepared", *words).losses == launcher.train_here("prepared-2", "--steps", "1").losses


def test_lines_wait_for_room(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    place = disk("16k")
    lines, path = Lines(place / "lines"), place / "lines"
    written = [f"{i} {'x' * 997}\n" for i in range(30)]
    for line in written:
        lines.write(line)
    there = path.read_text()
    assert there == "".join(written[: there.count("\n")]), "a line was torn"
    assert 0 < there.count("\n") < 30
    assert [r.message for r in caplog.records] == [
        f"{path} can't be written (No space left on device): its lines wait in memory"
    ]
    disk("1m")
    lines.write("last\n")
    lines.close()
    assert path.read_text() == "".join(written) + "last\n"


def test_lines_that_never_found_room_are_an_error(disk: Disk) -> None:
    lines = Lines(disk("4k") / "lines")
    for _ in range(9):
        lines.write("x" * 999 + "\n")
    with pytest.raises(UserError, match="lines of .*/lines could not be written: No space left on device"):
        lines.close()


def test_events_end_on_a_full_disk(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(disk("4k"), 1)
    for step in range(1000):
        events.add_scalar("loss", 1.0, step)
    events.close()
    (record,) = caplog.records
    assert "TensorBoard events in" in record.message
    assert record.message.endswith("stop here: No space left on device")
