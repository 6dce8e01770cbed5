"""Runs that `mtjax launch` starts again: nothing of the run is lost but time."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.runs import MASKS, Finished, Launcher, ended, finish, relative_difference, wait_until

pytestmark = pytest.mark.long

PROGRAM = """
import itertools, sys
from mtjax.launch import run
from mtjax.commands.launch import main
left = int(sys.argv.pop(1))
if left < 8:
    answers = itertools.chain([8], itertools.repeat(left))
    run.launch.__kwdefaults__["gpus"] = lambda: [str(i) for i in range(next(answers))]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("left", "mesh", "processes"), [pytest.param(8, "2x4", 2, marks=pytest.mark.exhaustive), (6, "1x4", 1)]
)
def test_a_killed_run_is_started_again_on_the_devices_that_are_left(
    left: int, mesh: str, processes: int, launcher: Launcher, uninterrupted: Finished
) -> None:
    name = f"launched-{left}"
    out = launcher.folder / name
    steps = ["--steps", "40", "--checkpoint-every", "10", "--peer-timeout", "60", *MASKS]
    words = launcher.command("--data", "text.txt", "--out", name, *steps)[3:]
    command = [sys.executable, "-c", PROGRAM, str(left), "--processes", "2", "--restarts", "2", "--", *words]
    process = subprocess.Popen(command, cwd=launcher.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ended([process]):
        wait_until(lambda: (out / "checkpoints" / "10").is_dir(), process, "the checkpoint of step 10")
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[1]), signal.SIGKILL)
        finished = finish(process, out)
    assert finished.code == 0, finished.stderr
    assert "launch: process 1 was killed by SIGKILL; restart 1 of 2 in 1 s" in finished.stderr
    assert re.search(rf"^\[0\] resumed from step [123]0 in {name}/checkpoints", finished.stdout, re.MULTILINE)
    last = finished.stdout.rpartition("[0] mesh ")[2].partition("\n")[0]
    assert last.split()[0] == mesh
    assert ("in 2 processes" in last) == (processes == 2)
    assert list(finished.losses) == list(range(1, 41))
    assert relative_difference(finished.losses, uninterrupted.losses) < 1e-5
