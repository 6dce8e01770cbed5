"""Processes that are killed, frozen, late or wrong: each of the others says so in one sentence, and none waits on."""

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mtjax.errors import LOST
from tests.end_to_end.runs import Launcher, ended, finish, free_port, wait_for_checkpoint, wait_until
from tests.train.test_run_tokenizer import trained

pytestmark = pytest.mark.long

TIMEOUT = 10
LONG_RUN = ["--steps", "100000", "--checkpoint-every", "5", "--peer-timeout", str(TIMEOUT)]


def the_error(stderr: str) -> str:
    """The one line of stderr that is not progress of preparing data."""
    (line,) = [line for line in stderr.splitlines() if not re.match("preparing|training a tokenizer", line)]
    return line


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGSTOP),  # the first process has jax's coordination service
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_the_other_names_who_is_lost(victim: int, number: signal.Signals, launcher: Launcher) -> None:
    name = f"lost-{victim}-{number.name}"
    out = launcher.folder / name
    with ended(launcher.start_together(name, *LONG_RUN)) as started:
        wait_for_checkpoint(out, 5, started[0])
        lost = started[victim]
        lost.send_signal(number)
        finished = finish(started[1 - victim], out)  # at once, if the machine is not busy
    assert finished.code == LOST
    said = re.fullmatch(
        rf"error: process {victim} \(\S+, pid {lost.pid}\) stopped responding at (?:step|the save after step) \d+; "
        "resume with: (mtjax .*)",
        the_error(finished.stderr),
    )
    assert said, finished.stderr
    if (victim, number) == (1, signal.SIGKILL):
        words = shlex.split(said[1])[2:]
        again = finish(launcher.start(*words, "--steps", str(max(finished.losses) + 2), bare=True), out)
        assert again.code == 0, again.stderr
        assert "resumed from step" in again.stdout
        assert "took" not in again.stdout  # the folder was given back


def test_one_process_with_wrong_input_ends_all(launcher: Launcher) -> None:
    together = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--out", "one-wrong"]
    right = launcher.start(*together, "--process-id", "0", "--steps", "3")
    wrong = launcher.start(*together, "--process-id", "1", "--steps", "3", data="missing.txt")
    with ended([right, wrong]) as started:
        finished = [finish(process, launcher.folder / "one-wrong") for process in started]
    assert [end.code for end in finished] == [2, 2]
    assert the_error(finished[1].stderr) == "error: no file matches 'missing.txt'"
    said = rf"error: process 1 \(\S+, pid {wrong.pid}\) ended: no file matches 'missing.txt'"
    assert re.fullmatch(said, the_error(finished[0].stderr))


SETTINGS = "process 1 has --steps 4, and process 0 has --steps 3: start all processes with the same options"
CORPUS = (
    r"process 1 has other training text than process 0: changed\.txt \(\d+ documents, digest \w{8}\), and text\.txt "
    r"\(\d+ documents, digest \w{8}\): give all machines the same files"
)


@pytest.mark.parametrize(("steps", "data", "said"), [("4", "text.txt", SETTINGS), ("3", "changed.txt", CORPUS)])
def test_processes_with_other_settings_or_text_end_before_a_step(
    steps: str, data: str, said: str, launcher: Launcher
) -> None:
    """The other text has another last word, and the tokenizer of the first."""
    out, tokenizer = launcher.folder / f"other-{steps}", words_of(launcher.folder)
    (launcher.folder / "changed.txt").write_text((launcher.folder / "text.txt").read_text()[:-1] + "k")
    together = ["--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--out", out.name]
    together += ["--tokenizer", str(tokenizer)]
    first = launcher.start(*together, "--process-id", "0", "--steps", "3")
    second = launcher.start(*together, "--process-id", "1", "--steps", steps, data=data)
    with ended([first, second]) as started:
        finished = [finish(process, out) for process in started]
    assert [end.code for end in finished] == [2, 2]
    for end in finished:
        assert re.search(f"error: .*{said}", the_error(end.stderr)), end.stderr
    assert not (out / "checkpoints").exists()


def words_of(folder: Path) -> Path:
    """A tokenizer for the folder's text."""
    return trained(folder / "words" / "tokenizer.json", 1)


def test_a_step_that_takes_too_long_leaves_stacks_and_a_name(launcher: Launcher) -> None:
    out = launcher.folder / "late"
    options, late = ("--steps", "8", "--step-timeout", "3"), {1: (6, "time.sleep(12)")}
    with ended(launcher.start_together("late", *options, bare=True, at=late)) as started:
        finished = [finish(process, out) for process in started]
    assert [end.code for end in finished] == [0, 0], [end.stderr for end in finished]
    name = rf"process 1 \(\S+, pid {started[1].pid}\)"
    assert re.search(rf"step 6 takes far longer than earlier steps; {name} did not reach it", finished[0].stdout)
    assert "in next_batch" in (out / "stacks/step-6-process-1.txt").read_text()
    assert (out / "stacks/step-6-process-0.txt").stat().st_size > 0


ALONE = """
import sys
from mtjax.config import Parallel
from mtjax.sharding import processes
from mtjax.runtime.processes import coordination, peers
from mtjax.cli import run_main
port, number, meets = sys.argv[1:]
if meets == "nobody":  # else both join, a busy machine's one long after the other
    peers.START_TIMEOUT = processes.START_TIMEOUT = 5
def body():
    with peers.Peers(Parallel(coordinator=f"localhost:{port}", num_processes=2, process_id=int(number))):
        if meets == "yes":
            coordination.all_gather_text("the tea", "milk", timeout=2)
        else:
            import time; time.sleep(600)
sys.exit(run_main(body))
"""


def alone(port: int, number: int, meets: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", ALONE, str(port), str(number), meets]
    return subprocess.Popen(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_process_that_nobody_joins_says_so(tmp_path: Path) -> None:
    """The first one of a run, and the second one of another: both wait at the same time."""
    ports = free_port(), free_port()
    with ended([alone(port, number, "nobody") for number, port in enumerate(ports)]) as started:
        for port, process in zip(ports, started, strict=True):
            finished = finish(process, tmp_path)
            assert finished.code == LOST
            assert the_error(finished.stderr).startswith(
                f"error: not all processes of this run connected at localhost:{port} within 5 s: check that each is "
            )


def test_who_does_not_come_to_a_meeting_is_named(tmp_path: Path) -> None:
    port = free_port()
    with ended([alone(port, 0, "no"), alone(port, 1, "yes")]) as started:
        finished = finish(started[1], tmp_path)
    assert finished.code == 2
    assert "error: process 0 did not reach the barrier 'the tea' within 2 s: " in the_error(finished.stderr)


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.exhaustive), 1]
)  # the first process makes a checkpoint of what all have written
def test_a_save_that_fails_in_one_process_is_counted_in_all(victim: int, launcher: Launcher) -> None:
    """The system lets a process write no file longer than a kilobyte, for one save, and then for good."""
    name = f"part-{victim}"
    out = launcher.folder / name
    options = ["--steps", "100000", "--checkpoint-every", "5", "--max-failed-saves", "1", "--peer-timeout", "30"]
    options += ["--log-every", "100000"]  # what it says is a file, too, and stays below the limit

    def allow(size: int) -> None:
        resource.prlimit(started[victim].pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def says(words: str) -> bool:
        return words in (launcher.folder / f"{name}.txt").read_text()

    with (
        (launcher.folder / f"{name}.txt").open("w") as said,
        ended(launcher.start_together(name, *options, stdout=said)) as started,
    ):
        wait_for_checkpoint(out, 5, started[0])
        allow(4000)
        wait_until(lambda: says("could not be saved"), started[0], "the failed save")
        allow(resource.RLIM_INFINITY)
        newest = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
        wait_for_checkpoint(out, newest + 20, started[0])
        allow(4000)
        finished = [finish(process, out) for process in started]
    assert [end.code for end in finished] == [2, 2]
    for end in finished:
        assert re.search(
            rf"step \d+ could not be saved: process {victim} \(\S+, pid {started[victim].pid}\): \S+: File too large; "
            rf"the last good checkpoint is {name}/checkpoints/\d+; ",
            the_error(end.stderr),
        )
