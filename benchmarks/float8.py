"""Losses in bfloat16 and with each recipe of FP8, resumed in the middle: the table of docs/float8.md.

    python benchmarks/float8.py novels.jsonl others.jsonl [--steps 1000] [--only delayed rowwise]

Trains the default model from the same parameters, on the same batches, on one virtual CPU device. Each run ends after
half of its steps, and a new process resumes it. Runs that are not in `--only` are kept from the last results.
"""

import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from train_step import processor

from mtjax.inspect.write_files import write

SETTINGS = {"mesh": "1x1", "compute_dtype": "bfloat16", "valid_batches": 50, "log_every": 1, "prompt": "None"}
"""Changes to configs/default.toml, which has 4 layers of 128, and 8 samples of 64 tokens."""
RUNS: dict[str, dict[str, str]] = {
    "bfloat16": {},
    "tensorwise": {"fp8": "tensorwise"},
    "delayed": {"fp8": "delayed"},
    "rowwise": {"fp8": "rowwise"},
    "tensorwise, exact scales": {"fp8": "tensorwise", "fp8_scales": "exact"},
    "delayed, exact scales": {"fp8": "delayed", "fp8_scales": "exact"},
    "rowwise, exact scales": {"fp8": "rowwise", "fp8_scales": "exact"},
}


def train(settings: dict[str, Any], *switches: str) -> None:
    """Runs `mtjax train` with these settings."""
    options = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, "-m", "mtjax.train", *options, *switches], check=True, stdout=subprocess.DEVNULL)


def losses(name: str, texts: dict[str, Path], steps: int, folder: Path) -> dict[str, Any]:
    """Trains one run; returns the loss of each step, and the validation losses in the middle and at the end."""
    out, half = folder / name.replace(", ", "-").replace(" ", "-"), steps // 2
    settings: dict[str, Any] = SETTINGS | RUNS[name] | texts | {"out": out, "decay_steps": steps}
    settings |= {"valid_every": half, "checkpoint_every": half}
    train(settings | {"steps": half})
    train(settings | {"steps": steps}, "--resume")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {key: [line[key] for line in lines if key in line] for key in ("loss", "valid_loss")}
    assert len(found["loss"]) == steps, f"{name}: {len(found['loss'])} losses of {steps} steps"
    return found


def main(
    train_data: tyro.conf.Positional[Path],
    valid_data: tyro.conf.Positional[Path],
    steps: int = 1000,
    only: tuple[str, ...] = tuple(RUNS),
    results: Path = Path(__file__).parent / "results" / "float8-cpu.json",
) -> None:
    """Trains the runs, prints their mean losses and writes them."""
    found = json.loads(results.read_text())["losses"] if results.exists() else {}
    for name in only:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = losses(name, {"train_data": train_data, "valid_data": valid_data}, steps, Path(folder))
        made = {"date": date.today().isoformat(), "jax": jax.__version__, "processor": processor()}
        write(results, json.dumps(made | {"settings": SETTINGS, "steps": steps, "losses": found}, indent=1))
    windows = [slice(first, first + steps // 5) for first in range(0, steps, steps // 5)]
    heads = (*(f"{w.start + 1} to {w.stop}" for w in windows), f"validation, {steps // 2}", str(steps), "gap")
    table, plain = Table("FP8", *heads), found["bfloat16"]["valid_loss"][-1]
    for name in (name for name in RUNS if name in found):
        each, valid = found[name]["loss"], found[name]["valid_loss"]
        means = (f"{np.mean(each[w]):.4f}" for w in windows)
        table.add_row(name, *means, *(f"{v:.4f}" for v in valid), f"{valid[-1] / plain - 1:+.2%}")
    Console(width=200).print(table)


if __name__ == "__main__":
    tyro.cli(main)
