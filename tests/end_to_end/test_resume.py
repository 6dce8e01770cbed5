"""A run that was stopped in any way and resumed equals one that never was, to the bit."""

import os
import signal
import time

import pytest

from mtjax.train.folder.lock import lock_folder
from tests.end_to_end.runs import Finished, Launcher, ended, finish, wait_for_checkpoint, wait_for_step

STEPS = ["--steps", "40"]


def test_stopped_by_sigterm_then_killed(launcher: Launcher, uninterrupted: Finished) -> None:
    """One run in three parts; each ends in another way, and the next goes on from there."""
    out = launcher.folder / "interrupted"
    stopped = stop(launcher, "interrupted", signal.SIGTERM, after_step=5)
    assert "no checkpoint" in stopped.stdout  # a run that has none starts
    assert "stopped by SIGTERM after step" in stopped.stdout

    before = max(stopped.losses)
    with ended([launcher.start("--out", "interrupted", *STEPS, "--resume", "--checkpoint-every", "4")]) as started:
        following = 4 * (before // 4 + 1)
        wait_for_checkpoint(out, following, started[0])
        wait_for_step(out, following + 1, started[0])
        started[0].kill()
        killed = finish(started[0], out)
    assert killed.code == -signal.SIGKILL
    assert before < max(killed.losses) < 40

    last = launcher.train_here("interrupted", *STEPS, "--resume")
    assert list(last.losses) == list(range(1, 41))  # no step twice, none missing
    assert last.losses == uninterrupted.losses
    assert [entry["grad_norm"] for entry in last.metrics] == [entry["grad_norm"] for entry in uninterrupted.metrics]
    assert last.fingerprints(40) == uninterrupted.fingerprints(40)
    assert killed.metrics[-1]["time/down"] == 0.0  # who was asked to stop had lost nothing
    assert last.metrics[-1]["time/down"] > 0.0
    assert last.metrics[-1]["time/done_again"] > 0.0
    assert " s in 3 starts: " in last.stdout


@pytest.mark.long
def test_stopped_by_ctrl_c(launcher: Launcher, uninterrupted: Finished) -> None:
    stopped = stop(launcher, "ctrl-c", signal.SIGINT, after_step=5)
    assert "stopped by Ctrl-C after step" in stopped.stdout
    last = launcher.train_here("ctrl-c", *STEPS, "--resume")
    assert f"resumed from step {max(stopped.losses)}" in last.stdout
    assert last.losses == uninterrupted.losses
    assert last.fingerprints(40) == uninterrupted.fingerprints(40)


def stop(launcher: Launcher, name: str, number: signal.Signals, after_step: int) -> Finished:
    """Starts or resumes a run, and sends it a signal when it has logged a step."""
    out = launcher.folder / name
    with ended([launcher.start("--out", name, *STEPS, "--resume")]) as started:
        wait_for_step(out, after_step, started[0])
        started[0].send_signal(number)
        finished = finish(started[0], out)
    assert finished.code == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    reached = max(finished.losses)
    assert after_step <= reached < 40, "the signal came too late to stop anything"
    assert max(finished.checkpoints) == reached  # saved where it stopped: nothing is lost
    return finished


def test_a_finished_run_resumed_has_nothing_to_do(launcher: Launcher, uninterrupted: Finished) -> None:
    again = launcher.train_here("uninterrupted", *STEPS, "--resume")
    assert again.metrics == uninterrupted.metrics
    assert again.checkpoints == {40}


def test_a_folder_in_use_is_left_alone(launcher: Launcher, uninterrupted: Finished) -> None:
    """Two runs would drop each other's metrics and checkpoints."""
    lock = lock_folder(uninterrupted.out, print)
    second = launcher.run_here("uninterrupted", *STEPS, "--resume")
    lock.release()
    assert second.code == 2
    assert f"error: uninterrupted is in use: process {os.getpid()} on " in second.stderr
    assert (second.metrics, second.checkpoints) == (uninterrupted.metrics, {40})


@pytest.mark.long
def test_a_second_start_beside_a_running_one_changes_nothing(launcher: Launcher) -> None:
    out = launcher.folder / "two-starts"
    with ended([launcher.start("--out", "two-starts", "--steps", "400", "--checkpoint-every", "50")]) as started:
        wait_for_step(out, 60, started[0])
        second = finish(launcher.start("--out", "two-starts", "--steps", "400", "--resume"), out)
        first = finish(started[0], out)
    assert second.code == 2
    assert f"error: two-starts is in use: process {started[0].pid} on " in second.stderr
    assert first.code == 0
    assert list(first.losses) == list(range(1, 401))


@pytest.mark.long
@pytest.mark.parametrize("delay", [0.7, 1.5, 2.5, 4.0, 6.0, 9.0])
def test_ctrl_c_ends_a_run_that_is_starting_within_three_seconds(delay: float, launcher: Launcher) -> None:
    """While it imports, looks for devices, prepares text, makes the model or compiles."""
    with ended(
        [launcher.start("--out", f"starting-{delay}", "--steps", "100000", "--cache-dir", f"cache-{delay}")]
    ) as (process,):
        time.sleep(delay)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        finished = finish(process, launcher.folder / f"starting-{delay}", timeout=60)
        seconds = time.monotonic() - begun
    if not finished.losses:  # else it saves first
        assert seconds < 3
        assert finished.code in (130, -signal.SIGINT)
        assert "Traceback" not in finished.stderr or delay < 1


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["4x2", "8x1", "1x1"])
def test_resumed_on_another_mesh(mesh: str, launcher: Launcher, uninterrupted: Finished) -> None:
    out = f"mesh-{mesh}"
    launcher.train(out, "--steps", "20")
    moved = launcher.train(out, *STEPS, "--resume", "--mesh", mesh)
    for step, loss in uninterrupted.losses.items():
        assert moved.losses[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.long
def test_resumed_with_accumulation_and_bfloat16_is_bit_exact(launcher: Launcher) -> None:
    options = ["--microbatch-size", "2", "--compute-dtype", "bfloat16", "--recompute", "full"]
    whole = launcher.train("bf16-whole", "--steps", "12", *options)
    launcher.train("bf16", "--steps", "5", *options)
    resumed = launcher.train("bf16", "--steps", "12", "--resume", *options)
    assert resumed.losses == whole.losses
    assert resumed.fingerprints(12) == whole.fingerprints(12)
