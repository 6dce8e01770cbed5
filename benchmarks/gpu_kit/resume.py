"""A run that is killed and resumed ends bit-identical to one that was not."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_kit.child import Child
from mtjax.errors import UserError

STEPS, KILLED_AFTER = 30, 10
ROOT = Path(__file__).resolve().parents[2]
MODEL = """
[model]
num_layers = 2
hidden_size = 128
num_heads = 4
sequence_length = 64
vocab_multiple = 128

[parallel]
mesh = "1x1"

[training]
global_batch_size = 8
compute_dtype = "bfloat16"
deterministic = true

[output]
log_every = 1
valid_every = 0
checkpoint_every = 10
"""


def run(child: Child) -> dict[str, Any]:
    """Runs both; returns `ok` if losses, gradient norms and fingerprints are identical.

    Raises:
      UserError: a run failed.
    """
    folder = child.folder / "runs"
    write_inputs(folder)
    uninterrupted = train(folder, "whole")
    if uninterrupted.wait():
        raise UserError(f"the uninterrupted run failed: {last_line(folder / 'whole.log')}")
    killed = train(folder, "killed")
    while killed.poll() is None and not (folder / f"killed/checkpoints/{KILLED_AFTER}").is_dir():
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    if train(folder, "killed", "--resume").wait():
        raise UserError(f"the resumed run failed: {last_line(folder / 'killed.log')}")
    ends = [outcome(folder / name) for name in ("whole", "killed")]
    resumed = [line for line in (folder / "killed.log").read_text().splitlines() if line.startswith("resumed from")]
    ok = ends[0] == ends[1] and bool(ends[0]["fingerprints"]) and bool(resumed)
    return {"ok": ok, "steps": STEPS, "said": resumed, "losses": ends[0]["losses"][-1:], "same": ends[0] == ends[1]}


def write_inputs(folder: Path) -> None:
    """Makes a folder with a random text and the model's config."""
    folder.mkdir()
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 7))) for _ in range(150)]
    (folder / "text.txt").write_text("\n\n".join(" ".join(chance.choices(words, k=60)) for _ in range(200)))
    (folder / "tiny.toml").write_text(MODEL)


def environment() -> dict[str, str]:
    """Returns this process's environment, with the checkout's package."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def train(folder: Path, name: str, *options: str) -> "subprocess.Popen[bytes]":
    """Starts a run in a separate process."""
    command = [sys.executable, "-m", "mtjax.train", "--config", "tiny.toml", "--data", "text.txt", "--out", name]
    command += ["--cache-dir", "cache", "--steps", str(STEPS), *options]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, env=environment())


def outcome(out: Path) -> dict[str, Any]:
    """Returns the metrics that a run logged, and the fingerprints of its last checkpoint."""
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    metadata = json.loads((out / f"checkpoints/{STEPS}/page/metadata").read_text())
    logged = {name: [entry[name] for entry in metrics] for name in ("step", "loss", "grad_norm")}
    return {"losses": logged["loss"], "logged": logged, "fingerprints": metadata["fingerprints"]}


def last_line(path: Path) -> str:
    """Returns the last line of a log."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
