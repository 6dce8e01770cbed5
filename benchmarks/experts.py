"""Compares an MLP with eight experts of the same compute per token: the plot and the table of docs/experts.md.

    python benchmarks/experts.py --data NOVELS.jsonl [--steps 3000] [--runs FOLDER] [--out docs/experts.png]

Trains both models on the same batches, in float32 on a CPU, one after the other; 25 minutes each on one core. Runs are
stored in FOLDER, and existing ones are only read, so two processes can train one each.
"""

import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import jax
import matplotlib

matplotlib.use("Agg")

import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from mtjax.inspect.write_files import write

MODEL = {"family": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_size": 352}
TRAINING = {"sequence_length": 128, "global_batch_size": 32, "compute_dtype": "float32", "mesh": "1x1", "log_every": 50}
TRAINING |= {"warmup_steps": 50, "learning_rate": 5e-3, "min_learning_rate": 5e-4}
TRAINING |= {"valid_every": 250, "valid_batches": 32}
KINDS = {"mlp": {}, "experts": {"num_experts": 8, "expert_size": 176, "router_scale": 2}}
"""Each token is routed to two of the experts (top-2), each half as wide as the MLP."""
NAMES = {"mlp": "MLP", "experts": "8 experts, top 2"}


def logged(kind: str, data: Path, split: str, steps: int, runs: Path) -> list[dict]:
    """Returns the metrics of one run, which is trained if it does not exist."""
    out = runs / kind
    if not out.exists():
        settings = MODEL | TRAINING | KINDS[kind]
        settings |= {"data": data, "split": split, "steps": steps, "decay_steps": steps, "out": out}
        options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        subprocess.run([sys.executable, "-m", "mtjax.train", *options], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def validation(lines: list[dict]) -> dict[int, float]:
    """Returns validation losses by step."""
    return {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}


def draw(curves: dict[str, dict[int, float]], out: Path) -> None:
    """Plots both curves, and below them their difference."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for (kind, curve), style in zip(curves.items(), ("o--", "o-"), strict=True):
        above.plot(list(curve), list(curve.values()), style, markersize=3, linewidth=1, label=NAMES[kind])
    mlp, experts = curves.values()
    below.plot(list(mlp), [experts[step] - loss for step, loss in mlp.items()], "o-", markersize=3, color="black")
    below.axhline(0, linewidth=0.5, color="gray")
    above.set_ylabel("validation loss")
    below.set_ylabel("experts - MLP")
    below.set_xlabel(f"step of {TRAINING['global_batch_size'] * TRAINING['sequence_length']:,} tokens")
    above.legend()
    figure.savefig(out, dpi=110)


def main(
    data: Path,
    split: str = "970,25,5",
    steps: int = 3000,
    runs: Path = Path("runs/experts"),
    out: Path = Path("docs/experts.png"),
    results: Path = Path(__file__).parent / "results" / "experts-cpu.json",
) -> None:
    """Trains the missing runs, plots the validation losses, prints and writes them."""
    found = {kind: logged(kind, data, split, steps, runs) for kind in KINDS}
    curves = {kind: validation(lines) for kind, lines in found.items()}
    draw(curves, out)
    busiest = {line["step"]: line["expert_load_max"] for line in found["experts"]}
    made = {"date": date.today().isoformat(), "jax": jax.__version__, "model": MODEL, "training": TRAINING}
    made |= {"kinds": KINDS, "steps": steps, "split": split, "valid_loss": curves, "busiest": busiest}
    made["dead"] = {line["step"]: line["dead_experts"] for line in found["experts"] if line["dead_experts"]}
    write(results, json.dumps(made, indent=1))
    table = Table("step", *NAMES.values(), "difference", "busiest expert")
    for step, loss in curves["mlp"].items():
        other = curves["experts"][step]
        table.add_row(f"{step:,}", f"{loss:.4f}", f"{other:.4f}", f"{other - loss:+.4f}", f"{busiest[step]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
