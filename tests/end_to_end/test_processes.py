"""Several processes are one run: the numbers, the checkpoints and the end are those of one process."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

import pytest

from mtjax.commands.convert import main as convert
from tests.convert.hf_folders import GPT2_CONFIG, gpt2_shapes, random_tensors, write_folder
from tests.end_to_end.runs import MASKS, SIGNAL, Finished, Launcher, ended, finish, relative_difference, wait_for_step

pytestmark = pytest.mark.usefixtures("bare_end")
STEPS = ["--steps", "20", *MASKS]


@pytest.mark.long
def test_one_process_and_two_take_turns(launcher: Launcher, uninterrupted: Finished) -> None:
    """One process, two until SIGTERM, one on another mesh, then two again: the losses of one all the way."""
    launcher.train_here("together", "--steps", "4", *MASKS)
    at = (5, SIGNAL.format(number=int(signal.SIGTERM)))  # one of them is enough
    # One spelling of the folder in each process: they read the checkpoint and save the next one together.
    spelled = {1: str(launcher.folder / "together")}
    with ended(launcher.start_together("together", "--resume", *STEPS, at={1: at}, spelled=spelled)) as started:
        stopped, reached = stop(started, launcher.folder / "together", after_step=8)
    assert "resumed from step 4" in stopped[0].stdout
    assert stopped[0].checkpoints == {4, reached}
    assert relative_difference(stopped[0].losses, first_steps(uninterrupted, reached)) < 1e-6

    alone = launcher.train_here("together", "--resume", "--mesh", "4x2", "--steps", str(reached + 4), *MASKS)
    assert f"resumed from step {reached}" in alone.stdout
    back = launcher.train_together("together", "--resume", *STEPS, bare=False)  # their text and pictures, too
    assert f"resumed from step {reached + 4}" in back[0].stdout
    assert relative_difference(back[0].losses, uninterrupted.losses) < 1e-5


def stop(started: Sequence["Popen[str]"], out: Path, after_step: int) -> tuple[list[Finished], int]:
    """One of two processes is sent SIGTERM after a step: both end well, at the same step."""
    stopped = [finish(process, out) for process in started]
    for finished in stopped:
        assert finished.code == 0, finished.stderr
        assert "Traceback" not in finished.stderr
    reached = max(stopped[0].losses)
    assert after_step <= reached < 16
    assert f"stopped by SIGTERM after step {reached}; saved" in stopped[0].stdout
    assert "8 virtual CPU devices in 2 processes" in stopped[0].stdout
    assert "loss" not in stopped[1].stdout  # one process speaks (Gloo, under XLA, always does)
    return stopped, reached


def first_steps(run: Finished, last: int) -> dict[int, float]:
    """Losses of a run up to a step."""
    return {step: loss for step, loss in run.losses.items() if step <= last}


@pytest.fixture(scope="module")
def one_process(launcher: Launcher) -> Finished:
    """Five steps of one process on 1x8."""
    return launcher.train_here("one", "--steps", "5", "--mesh", "1x8")


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["1x8", pytest.param("4x2", marks=pytest.mark.exhaustive)])
def test_a_mesh_axis_may_cross_processes(mesh: str, launcher: Launcher, one_process: Finished) -> None:
    """1x8 puts one model-parallel group over both processes, each of which loads every sample."""
    same = ("--steps", "5", "--mesh", mesh)
    one = one_process if mesh == "1x8" else launcher.train_here(f"one-{mesh}", *same)
    two = launcher.train_together(f"two-{mesh}", *same)
    assert relative_difference(two[0].losses, one.losses) < 1e-6


@pytest.mark.exhaustive
def test_four_processes_with_two_devices_each(launcher: Launcher, uninterrupted: Finished) -> None:
    four = launcher.train_together("four", "--steps", "5", *MASKS, processes=4)
    assert relative_difference(four[0].losses, first_steps(uninterrupted, 5)) < 1e-6


@pytest.mark.long
def test_ctrl_c_stops_all_processes(launcher: Launcher) -> None:
    out = launcher.folder / "ctrl-c"
    with ended(launcher.start_together("ctrl-c", *STEPS, bare=True)) as started:
        wait_for_step(out, 5, started[0])
        for process in started:  # a terminal sends it to both
            process.send_signal(signal.SIGINT)
        stopped = [finish(process, out) for process in started]
    assert [finished.code for finished in stopped] == [0, 0], [f.stderr for f in stopped]
    assert stopped[0].checkpoints == {max(stopped[0].losses)}


@pytest.fixture(scope="module")
def converted(launcher: Launcher) -> Path:
    """A GPT-2 with random weights and a tokenizer, converted."""
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    hf = write_folder(launcher.folder / "hf", random_tensors(gpt2_shapes()), GPT2_CONFIG, tokenizer=True)
    ours = launcher.folder / "converted"
    assert convert(["--from", f"hf:{hf}", "--to", f"mtjax:{ours}", "--vocab-multiple", "256"]) == 0
    return ours


def from_weights(folder: Path, mesh: str) -> list[str]:
    """Options of a run that starts from them."""
    options = ["--config", str(folder / "config.toml"), "--init-from", str(folder), "--mesh", mesh, "--steps", "6"]
    options += ["--global-batch-size", "8", "--compute-dtype", "float32", "--warmup-steps", "2", "--log-every", "1"]
    return [*options, "--learning-rate", "1e-2", "--valid-every", "0"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["1x8"])
def test_two_processes_start_from_converted_weights_like_one(mesh: str, launcher: Launcher, converted: Path) -> None:
    one = launcher.train_here(f"from-one-{mesh}", *from_weights(converted, mesh))
    two = launcher.train_together(f"from-two-{mesh}", *from_weights(converted, mesh))
    assert f"weights from {converted / 'weights'}" in two[0].stdout
    assert "8 virtual CPU devices in 2 processes" in two[0].stdout
    assert len(one.losses) == 6
    assert relative_difference(two[0].losses, one.losses) < 1e-6
    drawn = [word for word in from_weights(converted, mesh) if word not in ("--init-from", str(converted))]
    other = launcher.train_here(f"drawn-{mesh}", *drawn, "--steps", "1")
    assert abs(other.losses[1] / one.losses[1] - 1) > 1e-3


@pytest.mark.long
def test_all_processes_refuse_damaged_weights(launcher: Launcher, converted: Path) -> None:
    folder = shutil.copytree(converted, launcher.folder / "damaged")
    (folder / "weights/state/parameters.positions/0.0").unlink()  # a missing chunk reads as zeros
    with ended(launcher.start_together("never", *from_weights(folder, "2x4"))) as started:
        refused = [finish(process, launcher.folder / "never") for process in started]
    assert [finished.code for finished in refused] == [2, 2]
    for finished in refused:
        assert "parameters.positions are not what was saved" in finished.stderr
        assert "Traceback" not in finished.stderr


@pytest.mark.long
def test_each_process_may_be_a_stage(launcher: Launcher, one_process: Finished) -> None:
    """Two processes of four devices: permutes go from one to the other, and both load the same samples."""
    stages = ("--steps", "5", "--mesh", "1x2x4", "--microbatch-size", "2")
    two = launcher.train_together("two-stages", *stages)
    assert relative_difference(two[0].losses, one_process.losses) < 1e-5
