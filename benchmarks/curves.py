"""Losses of runs that differ in one setting, on the same text: FP8 recipes, layer patterns, types of Adam's moments.

    python benchmarks/curves.py fp8 --train-data novels.jsonl --valid-data others.jsonl
    python benchmarks/curves.py hybrid --train-data ... --valid-data ... --size small --plot-to docs/hybrid.png

Trains each run of a set from the same seed on one device, a GPU or a virtual CPU device: of the size `tiny`
configs/default.toml, of `small` a model for a GPU. Each run of `fp8` ends after half of its steps, and a new process
resumes it. Prints mean and validation losses, and writes all losses to benchmarks/results/curves-SET-DEVICE.json; runs
that are not in `--only` are kept from the last results, if these are of the same settings, steps and texts.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import jax
import matplotlib

matplotlib.use("Agg")

import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from train_step import processor

from mtjax.inspect.write_files import write
from mtjax.runtime.devices import has_gpu

Settings = Mapping[str, Any]
Losses = dict[str, list[Any]]

COMMON: Settings = {"mesh": "1x1", "compute_dtype": "bfloat16", "valid_batches": 50, "log_every": 1, "prompt": "None"}
SIZES: Mapping[str, Settings] = {
    "tiny": {},
    "small": {
        "num_layers": 8,
        "hidden_size": 512,
        "num_heads": 8,
        "sequence_length": 512,
        "global_batch_size": 32,
        "init_std": 0.02,
        "learning_rate": 1e-3,
        "min_learning_rate": 1e-4,
        "beta2": 0.95,
    },
}
"""Changes to configs/default.toml, which has 4 layers of 128, and 8 samples of 64 tokens."""


@dataclass(frozen=True)
class Set:
    """Runs that are compared."""

    runs: Mapping[str, Settings]
    """The first is that which the others are compared with."""
    common: Settings = field(default_factory=dict)
    resumed: bool = False
    """Whether a new process continues each run in the middle."""


def _pattern(pattern: str, mlp_size: int, **others: Any) -> Settings:
    return {"layer_pattern": pattern, "mlp_size": mlp_size} | others


SETS: Mapping[str, Set] = {
    "fp8": Set(
        {
            "bfloat16": {},
            "tensorwise": {"fp8": "tensorwise"},
            "delayed": {"fp8": "delayed"},
            "rowwise": {"fp8": "rowwise"},
            "tensorwise, exact scales": {"fp8": "tensorwise", "fp8_scales": "exact"},
            "delayed, exact scales": {"fp8": "delayed", "fp8_scales": "exact"},
            "rowwise, exact scales": {"fp8": "rowwise", "fp8_scales": "exact"},
        },
        resumed=True,
    ),
    "moments": Set(
        {
            "float32": {},
            "mean in bfloat16": {"adam_mu_dtype": "bfloat16"},
            "mean and square in bfloat16": {"adam_mu_dtype": "bfloat16", "adam_nu_dtype": "bfloat16"},
        },
        common={"compute_dtype": "float32"},
    ),
    # Sizes with which a token of a training step takes 226 to 231 MFLOP in each run of --size small.
    "hybrid": Set(
        {
            "(*-)x8": _pattern("(*-)x8", 2048, position="rope"),
            "(M-M-*-M-)x2": _pattern("(M-M-*-M-)x2", 2176),
            "(M-)x8": _pattern("(M-)x8", 2208),
            "(G-G-*-G-)x2": _pattern("(G-G-*-G-)x2", 1024),
            "(G-)x8": _pattern("(G-)x8", 704),
        },
        common={
            "family": "hybrid",
            "num_layers": 16,
            "num_kv_heads": 8,
            "ssm_head_dim": 64,
            "ssm_state": 64,
            "ssm_groups": 2,
            "ssm_chunk": 128,
            "sequence_length": 1024,
            "global_batch_size": 16,
        },
    ),
}


@dataclass(frozen=True)
class Runner:
    """What all runs of a set have in common."""

    settings: Settings
    """With the texts."""
    steps: int
    resumed: bool
    folder: Path

    def losses(self, name: str, changes: Settings) -> Losses:
        """Trains one run; returns the loss of each step, the validation losses, and what the log says of its speed."""
        out, quarter = self.folder / re.sub(r"\W+", "-", name), self.steps // 4
        settings = {**self.settings, **changes, "out": out, "decay_steps": self.steps}
        settings |= {"warmup_steps": self.steps // 10, "valid_every": quarter}
        settings["checkpoint_every"] = 2 * quarter if self.resumed else 0
        start = time.monotonic()
        if self.resumed:
            train(settings | {"steps": 2 * quarter})
        train(settings | {"steps": self.steps}, *(["--resume"] if self.resumed else []))
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found: Losses = {key: [line[key] for line in lines if key in line] for key in ("loss", "valid_loss")}
        if len(found["loss"]) != self.steps:
            raise RuntimeError(f"{name}: {len(found['loss'])} losses of {self.steps} steps")
        print(f"{name}: {self.steps} steps and their compilation in {time.monotonic() - start:.0f} s", flush=True)
        return found


def train(settings: Settings, *switches: str) -> None:
    """Runs `mtjax train` with these settings.

    Raises:
      RuntimeError: it failed; with the end of what it printed.
    """
    options = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "mtjax.train", *options, *switches], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"mtjax train {' '.join((*options, *switches))}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def device_name() -> str:
    """Returns the name of the GPU, or of the processor, without starting a driver in this process."""
    if not has_gpu():
        return processor()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def table(found: Mapping[str, Losses], steps: int) -> Table:
    """Returns means of the losses of a fifth of the steps each, and validation losses after each quarter."""
    windows = [slice(first, first + steps // 5) for first in range(0, steps, steps // 5)]
    valid = [f"valid {(number + 1) * steps // 4}" for number in range(4)]
    made = Table("run", *(f"{w.start + 1} to {w.stop}" for w in windows), *valid, "gap")
    base = next(iter(found.values()))["valid_loss"][-1]
    for name, each in found.items():
        means = (f"{np.mean(each['loss'][w]):.4f}" for w in windows)
        gap = f"{each['valid_loss'][-1] / base - 1:+.2%}"
        made.add_row(name, *means, *(f"{loss:.4f}" for loss in each["valid_loss"]), gap)
    return made


def plot(found: Mapping[str, Losses], steps: int, title: str, path: Path) -> None:
    """Draws the means of 20 steps, and the validation losses as dots."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, each in found.items():
        means = np.reshape(each["loss"][: steps // 20 * 20], (-1, 20)).mean(1)
        (line,) = axes.plot(np.arange(1, len(means) + 1) * 20, means, linewidth=1, label=name)
        quarters = [(number + 1) * steps // 4 for number in range(len(each["valid_loss"]))]
        axes.plot(quarters, each["valid_loss"], "o", markersize=4, color=line.get_color())
    axes.set(xlabel="step", ylabel="loss (lines: training, dots: validation)", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    lowest = min(min(each["valid_loss"]) for each in found.values())
    axes.set_ylim(0.95 * lowest, 1.35 * lowest)
    figure.savefig(path, dpi=110)


def main(
    which: tyro.conf.Positional[Literal["fp8", "moments", "hybrid"]],
    train_data: Path,
    valid_data: Path,
    tokenizer: str | None = None,
    size: Literal["tiny", "small"] = "tiny",
    steps: int = 1000,
    only: tuple[str, ...] = (),
    jobs: int = 1,
    out: Path = Path(__file__).parent / "results",
    plot_to: Path | None = None,
) -> None:
    """Trains the runs of a set, several at a time with --jobs, prints their losses, writes and draws them."""
    chosen, device = SETS[which], device_name()
    if unknown := set(only) - chosen.runs.keys():
        sys.exit(f"error: --only {min(unknown)!r} is not a run: the runs are {', '.join(chosen.runs)}")
    if steps < 20 or steps % 20:
        sys.exit(f"error: --steps is {steps}, and must be a multiple of 20")
    texts: Settings = {"train_data": train_data, "valid_data": valid_data}
    texts |= {} if tokenizer is None else {"tokenizer": tokenizer}
    settings = {**COMMON, **SIZES[size], **chosen.common}
    made = {"size": size, "steps": steps, "settings": settings, "texts": [train_data.name, valid_data.name]}
    results = out / f"curves-{which}-{re.sub(r'[^A-Za-z0-9]+', '-', device)}.json"
    old = json.loads(results.read_text()) if results.exists() else {}
    kept: dict[str, Losses] = old["losses"] if all(old.get(key) == value for key, value in made.items()) else {}
    runs = {name: changes for name, changes in chosen.runs.items() if not only or name in only}
    first = next(iter(chosen.runs))
    if first not in runs and first not in kept:
        sys.exit(
            f"error: --only must include {first}, with which others are compared: {results} has none of these runs"
        )
    made |= {"date": date.today().isoformat(), "jax": jax.__version__, "device": device}
    found = {name: losses for name, losses in kept.items() if name not in runs}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        runner = Runner(settings | texts, steps, chosen.resumed, Path(folder))
        for name, losses in zip(runs, pool.map(runner.losses, runs, runs.values()), strict=True):
            found[name] = losses
            found = {name: found[name] for name in chosen.runs if name in found}
            write(results, json.dumps(made | {"losses": found}) + "\n")
    Console(width=200).print(table(found, steps))
    if plot_to is not None:
        plot(found, steps, f"{which}, {device}", plot_to)


if __name__ == "__main__":
    tyro.cli(main)
