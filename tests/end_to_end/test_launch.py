"""Runs that `mtjax launch` starts again: nothing of the run is lost but time."""

import subprocess
import sys

import pytest

from tests.end_to_end.runs import AT, BARE, SIGNAL, Launcher, ended, finish, relative_difference

pytestmark = pytest.mark.long

PROGRAM = """
import itertools, subprocess, sys
from mtjax.launch import run
from mtjax.commands.launch import main
left, killed, bare = int(sys.argv.pop(1)), sys.argv.pop(1), sys.argv.pop(1)
if left < 8:
    answers = itertools.chain([8], itertools.repeat(left))
    run.launch.__kwdefaults__["gpus"] = lambda: [str(i) for i in range(next(answers))]
start = subprocess.Popen
def start_with(command, **settings):
    is_killed = "--resume" not in command and command[-2:] == ["--process-id", "1"]
    return start([command[0], "-c", (killed if is_killed else "") + bare, *command[3:]], **settings)
subprocess.Popen = start_with
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("left", "mesh", "processes"), [pytest.param(8, "2x4", 2, marks=pytest.mark.exhaustive), (6, "1x4", 1)]
)
def test_a_killed_run_is_started_again_on_the_devices_that_are_left(
    left: int, mesh: str, processes: int, launcher: Launcher
) -> None:
    """The second process is killed before its seventh step, when the checkpoint of the fourth is complete."""
    name, steps = f"launched-{left}", ("--steps", "12")
    whole = launcher.train_here(f"never-{name}", *steps)
    wait = f"while not Path('{name}/checkpoints/4').is_dir(): time.sleep(0.05)\n        "
    killed = AT.format(step=7, action=wait + SIGNAL.format(number=9))
    words = ["--data", "text.txt", "--out", name, *steps, "--checkpoint-every", "4", "--peer-timeout", "60"]
    command = [sys.executable, "-c", PROGRAM, str(left), killed, BARE, "--processes", "2", "--restarts", "2", "--"]
    process = subprocess.Popen(
        [*command, *launcher.command(*words)[3:]],
        cwd=launcher.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended([process]):
        finished = finish(process, launcher.folder / name)
    assert finished.code == 0, finished.stderr
    assert "launch: process 1 was killed by SIGKILL; restart 1 of 2 in 1 s" in finished.stderr
    assert f"\n[0] resumed from step 4 in {name}/checkpoints" in finished.stdout
    last = finished.stdout.rpartition("[0] mesh ")[2].partition("\n")[0]
    assert last.split()[0] == mesh
    assert ("in 2 processes" in last) == (processes == 2)
    assert list(finished.losses) == list(range(1, 13))
    assert relative_difference(finished.losses, whole.losses) < 1e-5
