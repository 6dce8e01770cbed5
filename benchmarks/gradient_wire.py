"""Losses with gradients reduced in float32 and in bfloat16: the plot and the table of docs/notes/speed.md.

    python benchmarks/gradient_wire.py [--steps 500] [--out docs/gradient-wire.png]

Trains the default model twice from the same parameters, on the same batches of the default corpus, over a 4x2 mesh of
virtual CPU devices, with float32 matrix products, so that the runs differ in `grad_reduce_dtype` only.
"""

import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mtjax.inspect.write_files import write

TYPES = ("float32", "bfloat16")
SETTINGS = {"mesh": "4x2", "zero": 1, "warmup_steps": 50, "log_every": 1, "valid_every": 0}
"""Changes to configs/default.toml, which has 4 layers of 128, and 8 samples of 64 tokens."""


def losses(dtype: str, steps: int, folder: Path) -> list[float]:
    """Trains one run; returns the loss of each step."""
    out = folder / dtype
    settings = SETTINGS | {"grad_reduce_dtype": dtype, "steps": steps, "out": out}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run([sys.executable, "-m", "mtjax.train", *options], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def draw(curves: dict[str, list[float]], out: Path) -> None:
    """Plots both curves, and below them their difference."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for name, style in zip(curves, ("-", "--"), strict=True):
        above.plot(
            range(1, len(curves[name]) + 1), curves[name], style, linewidth=1, label=f"gradients reduced in {name}"
        )
    float32, bfloat16 = map(np.asarray, curves.values())
    below.plot(range(1, len(float32) + 1), bfloat16 - float32, linewidth=1, color="black")
    above.set_ylabel("loss")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    above.legend()
    figure.savefig(out, dpi=110)


def main(
    steps: int = 500,
    out: Path = Path("docs/gradient-wire.png"),
    results: Path = Path(__file__).parent / "results" / "gradient_wire-cpu.json",
) -> None:
    """Trains both runs, plots them, prints their differences and writes the losses."""
    with tempfile.TemporaryDirectory() as folder:
        curves = {dtype: losses(dtype, steps, Path(folder)) for dtype in TYPES}
    draw(curves, out)
    made = {"date": date.today().isoformat(), "jax": jax.__version__, "settings": SETTINGS, "losses": curves}
    write(results, json.dumps(made, indent=1))
    float32, bfloat16 = (np.asarray(curves[name]) for name in TYPES)
    table = Table("steps", "float32", "bfloat16", "largest difference of a step")
    for first in range(0, steps, 100):
        window = slice(first, first + 100)
        means = (f"{curve[window].mean():.4f}" for curve in (float32, bfloat16))
        table.add_row(f"{first + 1} to {first + 100}", *means, f"{np.abs(bfloat16 - float32)[window].max():.4f}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
