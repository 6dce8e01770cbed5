"""A run that was stopped in any way and resumed equals one that never was, to the bit."""

import itertools
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from mtjax.train import loop
from mtjax.train.folder.lock import lock_folder
from tests.end_to_end.runs import (
    INTERRUPTS,
    MASKS,
    SIGNAL,
    WAIT,
    Finished,
    Launcher,
    ended,
    finish,
    wait_for_checkpoint,
    wait_for_step,
)

pytestmark = pytest.mark.usefixtures("bare_end")
STEPS = ["--steps", "20", *MASKS]


@pytest.mark.long
def test_stopped_by_sigterm_then_killed(
    launcher: Launcher, uninterrupted: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run in three parts; each ends in another way, and the next goes on from there."""
    out, before = launcher.folder / "interrupted", 6
    with monkeypatch.context() as patch:
        patch.setattr(loop, "next_batch", with_signal_at(before, signal.SIGTERM))
        stopped = launcher.train_here("interrupted", *STEPS, "--resume")
    assert "no checkpoint" in stopped.stdout  # a run that has none starts
    assert f"stopped by SIGTERM after step {before}" in stopped.stdout
    assert max(stopped.losses) == before and stopped.checkpoints == {before}

    following = 4 * (before // 4 + 1)
    words = ("--out", "interrupted", *STEPS, "--resume", "--checkpoint-every", "4")
    with ended([launcher.start(*words, at=(following + 2 - before, WAIT))]) as started:
        wait_for_checkpoint(out, following, started[0])
        wait_for_step(out, following + 1, started[0])
        started[0].kill()
        killed = finish(started[0], out)
    assert killed.code == -signal.SIGKILL
    assert before < max(killed.losses) < 20

    last = launcher.train_here("interrupted", *STEPS, "--resume")
    assert list(last.losses) == list(range(1, 21))  # no step twice, none missing
    assert last.losses == uninterrupted.losses
    assert [entry["grad_norm"] for entry in last.metrics] == [entry["grad_norm"] for entry in uninterrupted.metrics]
    assert last.fingerprints(20) == uninterrupted.fingerprints(20)
    assert killed.metrics[-1]["time/down"] == 0.0  # who was asked to stop had lost nothing
    assert last.metrics[-1]["time/down"] > 0.0
    assert last.metrics[-1]["time/done_again"] > 0.0
    assert " s in 3 starts: " in last.stdout


def with_signal_at(step: int, number: signal.Signals) -> Callable[..., Any]:
    """What loads batches, but for a signal to this process, as that of a step is loaded."""
    load, calls = loop.next_batch, itertools.count(1)

    def next_batch(*arguments: Any) -> Any:
        if next(calls) == step:
            os.kill(os.getpid(), number)
        return load(*arguments)

    return next_batch


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.exhaustive), "Ctrl-C"])
def test_stopped_in_a_process_of_its_own(name: str, launcher: Launcher, uninterrupted: Finished) -> None:
    stopped = stop(launcher, name, INTERRUPTS[name], after_step=5)
    assert f"stopped by {name} after step" in stopped.stdout
    last = launcher.train_here(name, *STEPS, "--resume")
    assert f"resumed from step {max(stopped.losses)}" in last.stdout
    assert last.losses == uninterrupted.losses
    assert last.fingerprints(20) == uninterrupted.fingerprints(20)


def stop(launcher: Launcher, name: str, number: signal.Signals, after_step: int) -> Finished:
    """Starts a run, which is sent a signal after a step."""
    out, at = launcher.folder / name, (after_step + 1, SIGNAL.format(number=int(number)))
    with ended([launcher.start("--out", name, *STEPS, "--resume", at=at)]) as started:
        finished = finish(started[0], out)
    assert finished.code == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    reached = max(finished.losses)
    assert reached == after_step + 1  # the step whose batch was being loaded
    assert max(finished.checkpoints) == reached  # saved where it stopped: nothing is lost
    return finished


def test_a_run_goes_on_with_its_own_tokenizer_when_its_text_has_grown(launcher: Launcher) -> None:
    """As it would with `--tokenizer`: one that is trained on the longer text has other ids."""
    text = launcher.folder / "growing.txt"
    text.write_text((launcher.folder / "text.txt").read_text())
    first = launcher.train_here("growing", "--steps", "3", data=text.name)
    own = (first.out / "tokenizer.json").read_bytes()
    (launcher.folder / "named.json").write_bytes(own)
    shutil.copytree(first.out, launcher.folder / "named")
    with text.open("a") as file:
        file.write("\n\nquizzical jackdaws vex bumpy wizards" * 400)
    again = ("--steps", "4", "--resume", "--allow-changed", "data")
    named = launcher.train_here("named", *again, "--tokenizer", "named.json", data=text.name)
    last = launcher.train_here("growing", *again, data=text.name)
    assert last.losses == named.losses
    assert (first.out / "tokenizer.json").read_bytes() == own


def test_a_finished_run_resumed_has_nothing_to_do(launcher: Launcher, uninterrupted: Finished) -> None:
    again = launcher.train_here("uninterrupted", *STEPS, "--resume")
    assert again.metrics == uninterrupted.metrics
    assert again.checkpoints == {20}


def test_a_folder_in_use_is_left_alone(launcher: Launcher, uninterrupted: Finished) -> None:
    """Two runs would drop each other's metrics and checkpoints."""
    lock = lock_folder(uninterrupted.out, print)
    second = launcher.run_here("uninterrupted", *STEPS, "--resume")
    lock.release()
    assert second.code == 2
    assert f"error: uninterrupted is in use: process {os.getpid()} on " in second.stderr
    assert (second.metrics, second.checkpoints) == (uninterrupted.metrics, {20})


@pytest.mark.long
def test_a_second_start_beside_a_running_one_changes_nothing(launcher: Launcher) -> None:
    """The first one waits before its fifth step until the second one has ended."""
    out = launcher.folder / "two-starts"
    steps, until = ("--out", "two-starts", "--steps", "8", "--checkpoint-every", "2"), "go-on"
    waits = f"while not Path('{until}').exists(): time.sleep(0.05)"
    with ended([launcher.start(*steps, at=(5, waits))]) as started:
        wait_for_step(out, 4, started[0])
        second = launcher.run_here("two-starts", "--steps", "8", "--resume")
        (launcher.folder / until).touch()
        first = finish(started[0], out)
    assert second.code == 2
    assert f"error: two-starts is in use: process {started[0].pid} on " in second.stderr
    assert first.code == 0
    assert list(first.losses) == list(range(1, 9))


@pytest.mark.long
@pytest.mark.parametrize(
    "delay", [0.7, 2.5, *(pytest.param(d, marks=pytest.mark.exhaustive) for d in (1.5, 4.0, 6.0, 9.0))]
)
def test_ctrl_c_ends_a_run_that_is_starting(delay: float, launcher: Launcher) -> None:
    """While it imports, looks for devices, prepares text, makes the model or compiles; within three seconds of work, of
    two cores, for on the clock of a busy machine it may be minutes."""
    with ended(
        [launcher.start("--out", f"starting-{delay}", "--steps", "100000", "--cache-dir", f"cache-{delay}")]
    ) as (process,):
        time.sleep(delay)
        before, own = worked_by_children(), sum(psutil.Process(process.pid).cpu_times()[:2])
        process.send_signal(signal.SIGINT)
        finished = finish(process, launcher.folder / f"starting-{delay}")
        seconds = worked_by_children() - before - own
    if not finished.losses:  # else it saves first
        assert seconds < 2 * 3
        assert finished.code in (130, -signal.SIGINT)
        assert "Traceback" not in finished.stderr or delay < 1


def worked_by_children() -> float:
    """Seconds of processor time of the processes of this one that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["4x2", pytest.param("1x1", marks=pytest.mark.exhaustive)])
def test_resumed_on_another_mesh(mesh: str, launcher: Launcher, uninterrupted: Finished) -> None:
    out = f"mesh-{mesh}"
    launcher.train_here(out, "--steps", "10", *MASKS)
    moved = launcher.train_here(out, *STEPS, "--resume", "--mesh", mesh)
    for step, loss in uninterrupted.losses.items():
        assert moved.losses[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.long
def test_resumed_with_accumulation_and_bfloat16_is_bit_exact(launcher: Launcher) -> None:
    options = ["--microbatch-size", "2", "--compute-dtype", "bfloat16", "--recompute", "full"]
    whole = launcher.train_here("bf16-whole", "--steps", "12", *options)
    launcher.train_here("bf16", "--steps", "5", *options)
    resumed = launcher.train_here("bf16", "--steps", "12", "--resume", *options)
    assert resumed.losses == whole.losses
    assert resumed.fingerprints(12) == whole.fingerprints(12)
