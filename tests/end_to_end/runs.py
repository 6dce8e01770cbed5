"""Starts `python -m mtjax.train` as a user does, on a model that trains in a second.

In processes of its own where signals, several processes or devices, or the exit code are the subject: each takes
seconds to import what this one has.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from subprocess import PIPE
from typing import IO

import jax

from mtjax.commands.train import main

TIMEOUT = 300
TINY = """
[model]
num_layers = 2
hidden_size = 64
num_heads = 8
sequence_length = 32
vocab_multiple = 128
hidden_dropout = 0.0
attention_dropout = 0.0

[parallel]
mesh = "2x4"

[optimizer]
learning_rate = 2e-3
min_learning_rate = 2e-4
warmup_steps = 4
decay_steps = 40

[training]
steps = 6
global_batch_size = 8
compute_dtype = "float32"

[output]
log_every = 1
valid_every = 0
checkpoint_every = 0
"""

MASKS = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
"""Of runs that must draw the same on other meshes, or when resumed: they double what programs take to compile."""
BARE = """
import sys
from mtjax.generate import training_sample
from mtjax.train import loop
from mtjax.commands.train import main
from mtjax.train.observability import goodput
loop.plot_losses = goodput.plot = lambda *_: None
training_sample.continue_text = lambda *_: ""
sys.exit(main(sys.argv[1:]))
"""
"""`python -m mtjax.train` without pictures and a text at its end, for which programs are compiled."""

AT = """
import itertools, os, sys, time
from pathlib import Path
from mtjax.train import loop
load, steps = loop.next_batch, itertools.count(1)
def next_batch(*arguments):
    if next(steps) == {step}:
        {action}
    return load(*arguments)
loop.next_batch = next_batch
"""
"""Does something as the batch of a start's so many-th step is loaded: a signal from outside may come too late."""
SIGNAL = "os.kill(os.getpid(), {number})"
WAIT = "time.sleep(600)"


@dataclass(frozen=True)
class Launcher:
    """Starts runs in `folder`, which has a text, a config of a tiny model and a cache of its own."""

    folder: Path

    @classmethod
    def prepare(cls, folder: Path) -> "Launcher":
        (folder / "text.txt").write_text(made_up_text())
        (folder / "tiny.toml").write_text(TINY)
        return cls(folder)

    def command(self, *options: str, bare: bool = False, at: tuple[int, str] | None = None) -> list[str]:
        """`at` is a step of this start, and what happens as its batch is loaded; then it ends `bare`, too."""
        given = ["--config", "tiny.toml"] if "--config" not in options else []
        before = AT.format(step=at[0], action=at[1]) if at else ""
        program = ["-c", before + BARE] if bare or at else ["-m", "mtjax.train"]
        return [sys.executable, *program, *given, "--cache-dir", "cache", *options]

    def start(
        self,
        *options: str,
        data: str = "text.txt",
        stdout: "int | IO[str]" = PIPE,
        bare: bool = False,
        at: tuple[int, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """A run in the background; its output is read by `finish`, unless it goes to a file."""
        return subprocess.Popen(
            self.command("--data", data, *options, bare=bare, at=at),
            cwd=self.folder,
            stdout=stdout,
            stderr=PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )

    def train(self, out: str, *options: str, data: str = "text.txt", timeout: int = TIMEOUT) -> "Finished":
        """A run that must end well."""
        finished = finish(self.start("--out", out, *options, data=data, bare=True), self.folder / out, timeout)
        assert finished.code == 0, f"exit code {finished.code}\n{finished.stdout}\n{finished.stderr}"
        return finished

    def run_here(self, out: str, *options: str, data: str = "text.txt", is_told: bool = True) -> "Finished":
        """A run in this process, which may end in any way; `out` is where it leaves its files, told so or not."""
        jax.devices()  # all eight: else the first run in this process would ask for as many as its mesh has
        words = self.command("--data", data, *(["--out", out] if is_told else []), *options)[3:]
        with chdir(self.folder), redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as complained:
            code = main(words)
        return look(code, said.getvalue(), complained.getvalue(), self.folder / out)

    def train_here(self, out: str, *options: str, data: str = "text.txt") -> "Finished":
        """A run in this process that must end well."""
        finished = self.run_here(out, *options, data=data)
        assert finished.code == 0, f"exit code {finished.code}\n{finished.stdout}\n{finished.stderr}"
        return finished

    def start_together(
        self,
        out: str,
        *options: str,
        processes: int = 2,
        stdout: "int | IO[str]" = PIPE,
        bare: bool = False,
        at: Mapping[int, tuple[int, str]] | None = None,
        spelled: Mapping[int, str] | None = None,
    ) -> "list[subprocess.Popen[str]]":
        """The processes of one run, of which some do something at a step (see `command`), or spell `out` otherwise."""
        at, outs = at or {}, dict.fromkeys(range(processes), out) | dict(spelled or {})
        command = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(processes), *options]
        return [
            self.start("--out", outs[i], *command, "--process-id", str(i), stdout=stdout, bare=bare, at=at.get(i))
            for i in range(processes)
        ]

    def train_together(self, out: str, *options: str, processes: int = 2, bare: bool = True) -> "list[Finished]":
        """Several processes as one run that must end well; process 0 comes first."""
        with ended(self.start_together(out, *options, processes=processes, bare=bare)) as started:
            all_of_them = [finish(process, self.folder / out) for process in started]
        for finished in all_of_them:
            assert finished.code == 0, f"exit code {finished.code}\n{finished.stdout}\n{finished.stderr}"
        return all_of_them


@dataclass(frozen=True)
class Finished:
    """A run after its end, as it was then: the folder may have changed since.

    Attributes:
      checkpoints: steps whose checkpoints are complete.
    """

    code: int
    stdout: str
    stderr: str
    out: Path
    metrics: list[dict[str, float]]
    checkpoints: set[int]

    @property
    def losses(self) -> dict[int, float]:
        """By step."""
        return {int(entry["step"]): entry["loss"] for entry in self.metrics}

    def fingerprints(self, step: int) -> dict[str, int]:
        """Of every array in the checkpoint of a step."""
        page: dict[str, dict[str, int]] = json.loads((self.out / f"checkpoints/{step}/page/metadata").read_text())
        return page["fingerprints"]


def finish(process: "subprocess.Popen[str]", out: Path, timeout: int = TIMEOUT) -> Finished:
    """Waits for a run."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout, stderr = process.communicate()
        raise AssertionError(f"still running after {timeout} s\n{stdout}\n{stderr}") from None
    return look(process.returncode, stdout or "", stderr, out)


def look(code: int, stdout: str, stderr: str, out: Path) -> Finished:
    """A run that has just ended."""
    checkpoints = {int(p.name) for p in out.glob("checkpoints/*") if p.name.isdigit()}
    return Finished(code, stdout, stderr, out, read_metrics(out), checkpoints)


@contextmanager
def ended(processes: "Sequence[subprocess.Popen[str]]") -> "Iterator[Sequence[subprocess.Popen[str]]]":
    """Kills what is left of `processes` at the end, whatever happens."""
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            if process.stderr and not process.stderr.closed:
                process.communicate()


def wait_for_step(out: Path, step: int, process: "subprocess.Popen[str]") -> None:
    """Waits until a run has logged this step."""
    wait_until(lambda: any(entry["step"] >= step for entry in read_metrics(out)), process, f"step {step}")


def wait_for_checkpoint(out: Path, step: int, process: "subprocess.Popen[str]") -> None:
    """Waits until the checkpoint of this step is complete."""
    wait_until(lambda: (out / "checkpoints" / str(step)).is_dir(), process, f"the checkpoint of step {step}")


def wait_until(done: "object", process: "subprocess.Popen[str]", what: str) -> None:
    assert callable(done)
    deadline = time.monotonic() + TIMEOUT
    while not done():
        if process.poll() is not None:
            stdout, stderr = process.communicate()
            raise AssertionError(f"the run ended ({process.returncode}) before {what}\n{stdout}\n{stderr}")
        assert time.monotonic() < deadline, f"{what} did not come in {TIMEOUT} s"
        time.sleep(0.05)


def read_metrics(out: Path) -> list[dict[str, float]]:
    """Whole lines of a run's metrics.jsonl, which may still be growing."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def relative_difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """Largest over the steps, which must be the same."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(abs(ours[step] / theirs[step] - 1) for step in ours)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def made_up_text() -> str:
    """80 kB of sentences from 150 made-up words."""
    chance = random.Random(0)
    words = ["".join(chance.choice("abcdefghij") for _ in range(chance.randint(2, 7))) for _ in range(150)]
    return "\n\n".join(" ".join(chance.choices(words, k=60)) for _ in range(250))


INTERRUPTS = {"SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
