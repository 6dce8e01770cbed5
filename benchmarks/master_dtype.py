"""Losses with master weights in float32, in bfloat16, and in bfloat16 to nearest: the table of docs/optimizer.md.

    python benchmarks/master_dtype.py --data novels.jsonl [--steps 1000]

Trains the default model from the same parameters, on the same batches, in bfloat16 on one virtual CPU device. The third
run replaces stochastic rounding, which no setting of mtjax does.
"""

import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from train_step import processor

from mtjax.inspect.write_files import write

SETTINGS = {
    "mesh": "1x1",
    "compute_dtype": "bfloat16",
    "learning_rate": 1e-3,
    "min_learning_rate": 1e-5,
    "beta2": 0.999,
    "log_every": 1,
    "checkpoint_every": 0,
}
"""Changes to configs/default.toml, which has 4 layers of 128, and 8 samples of 64 tokens."""
RUNS = {"float32": "float32", "bfloat16": "bfloat16", "bfloat16, to nearest": "bfloat16"}
TO_NEAREST = """
import runpy
from mtjax.train import rounding
rounding.round_stochastically = lambda array, *others: array.astype("bfloat16")
runpy.run_module("mtjax.train", run_name="__main__")
"""


def losses(name: str, data: Path, steps: int, folder: Path) -> tuple[list[float], float]:
    """Trains one run; returns the loss of each step, and the validation loss at the end."""
    out = folder / name.replace(", ", "-").replace(" ", "-")
    settings = SETTINGS | {"master_dtype": RUNS[name], "steps": steps, "valid_every": steps, "data": data, "out": out}
    options = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    program = ["-c", TO_NEAREST] if "nearest" in name else ["-m", "mtjax.train"]
    subprocess.run([sys.executable, *program, *options], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line], [e["valid_loss"] for e in lines if "valid_loss" in e][-1]


def main(
    data: Path, steps: int = 1000, results: Path = Path(__file__).parent / "results" / "master_dtype-cpu.json"
) -> None:
    """Trains the runs, prints their mean losses and writes them."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: losses(name, data, steps, Path(folder)) for name in RUNS}
    made = {"date": date.today().isoformat(), "jax": jax.__version__, "processor": processor(), "settings": SETTINGS}
    made |= {"losses": {name: each for name, (each, _) in found.items()}}
    write(results, json.dumps(made | {"valid": {name: valid for name, (_, valid) in found.items()}}, indent=1))
    windows = [slice(first, first + 100) for first in range(0, steps, 100)]
    table = Table("master weights", *(f"{w.start + 1} to {w.stop}" for w in windows), "validation")
    for name, (each, valid) in found.items():
        table.add_row(name, *(f"{np.mean(each[w]):.3f}" for w in windows), f"{valid:.3f}")
    Console(width=200).print(table)


if __name__ == "__main__":
    tyro.cli(main)
