"""Time of a training step, compared with PyTorch: the same GPT-2 shapes, batch and optimizer.

    python benchmarks/train_step.py gpt2-small --sequence-length 256 --global-batch-size 4 --compute-dtype float32

Each side runs in a separate process, alternating (mtjax, torch, mtjax, torch), so that neither holds the other's memory
and temporary load on the machine affects both. On a busy machine compare CPU seconds on one core: spin-waiting threads
distort them otherwise. PyTorch runs Hugging Face's GPT-2, eager and compiled; without torch and transformers
(`pip install '.[parity]'`) only mtjax runs. Results, with hardware, versions and date, go to
benchmarks/results/train_step-DEVICE.json.
"""

import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from mtjax import config as configs
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.flops import model_flops
from mtjax.analysis.hardware import by_device_kind
from mtjax.config import Config
from mtjax.config.sizes import padded_vocab_size

RESULTS = Path(__file__).parent / "results"
SIDES = ("mtjax", "torch", "torch-compiled")


@dataclass(frozen=True)
class Options:
    """Presets, changes and sides to time."""

    presets: Annotated[tuple[str, ...], tyro.conf.Positional] = ("gpt2-small",)
    """Names of shipped configs."""
    sequence_length: int | None = None
    """Overrides the preset's value."""
    global_batch_size: int | None = None
    """Overrides the preset's value."""
    compute_dtype: str | None = None
    """Overrides the preset's value."""
    dropout: float | None = None
    """Overrides all dropout rates of the preset."""
    recompute: str = "none"
    """Activation recomputation of mtjax; PyTorch recomputes nothing."""
    mesh: str = "1x1"
    """Mesh of mtjax; PyTorch runs on one device."""
    steps: int = 5
    """Timed steps of each run, after two warm-up steps that compile."""
    turns: int = 2
    """Number of runs of each side."""
    sides: tuple[str, ...] = SIDES
    """Sides to run."""
    child: str | None = None
    """Internal: the side that this process runs."""


def config_of(preset: str, options: Options) -> Config:
    """Returns the preset's config with the options' changes."""
    config = configs.load(preset)
    rate = config.model.hidden_dropout if options.dropout is None else options.dropout
    changes = {"sequence_length": options.sequence_length, "global_batch_size": options.global_batch_size}
    changes |= {"compute_dtype": options.compute_dtype, "recompute": options.recompute, "mesh": options.mesh}
    changes |= {"hidden_dropout": rate, "attention_dropout": rate}
    changed = {name: value for name, value in changes.items() if value is not None}
    return configs.replace(config, microbatch_size=None, **changed)


def tokens_of(config: Config, step: int) -> np.ndarray:
    """Returns random tokens, int32[batch, sequence + 1]."""
    shape = (config.training.global_batch_size, config.model.sequence_length + 1)
    vocab = config.model.vocab_size or 50257
    return np.random.default_rng(step).integers(0, vocab, shape, dtype=np.int32)


def timed(step: Callable[[int], None], steps: int) -> dict[str, list[float]]:
    """Times steps after two warm-up steps: wall-clock and CPU seconds; `step` must block until its result is ready."""
    for number in range(2):
        step(number)
    seconds, cpu_seconds = [], []
    for number in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        step(number)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def run_mtjax(config: Config, steps: int) -> dict[str, Any]:
    """Times mtjax's step, the program that `mtjax train` runs."""
    import jax

    from mtjax.layout.mesh import parse_mesh
    from mtjax.runtime.devices import attach_devices
    from mtjax.sharding.global_batch import global_batch
    from mtjax.train.observability.metrics import device_memory
    from mtjax.train.step import make_train_step

    mesh = attach_devices(parse_mesh(config.parallel.mesh))
    program = make_train_step(config, mesh)
    state = program.initialize(0)
    size = config.training.global_batch_size

    def step(number: int) -> None:
        nonlocal state
        text = tokens_of(config, number)
        arrays = {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": np.ones(text[:, 1:].shape, np.float32),
            "sample_index": np.arange(size, dtype=np.uint32),
        }
        state, metrics = program.step(state, global_batch(program.batch_sharding, arrays, size))
        jax.block_until_ready(metrics)

    times = timed(step, steps)
    memory = device_memory()
    return {
        **times,
        "device": jax.devices()[0].device_kind,
        "devices": mesh.size,
        "attention": program.config.model.attention,
        "peak_bytes": memory[0] if memory else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")},
    }


def run_torch(config: Config, steps: int, *, compiled: bool) -> dict[str, Any]:
    """Times Hugging Face's GPT-2 of the same shape and padded vocabulary, with AdamW and gradient clipping."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, optimizer_options = config.model, config.optimizer
    gpt2_config: Any = transformers.GPT2Config  # its signature depends on the version
    shape = gpt2_config(
        vocab_size=padded_vocab_size(model),
        n_positions=model.sequence_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        resid_pdrop=model.hidden_dropout,
        embd_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout,
        use_cache=False,
        attn_implementation="sdpa",
    )
    network: Any = transformers.GPT2LMHeadModel(shape)
    network.to(device).train()
    parameters = list(network.parameters())
    optimizer = torch.optim.AdamW(
        parameters,
        lr=optimizer_options.learning_rate,
        weight_decay=optimizer_options.weight_decay,
        fused=True,
    )
    forward = torch.compile(network) if compiled else network
    half = config.training.compute_dtype == "bfloat16"

    def step(number: int) -> None:
        text = torch.tensor(tokens_of(config, number), dtype=torch.long, device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            logits = forward(text[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, optimizer_options.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    times = timed(step, steps)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        **times,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "devices": 1,
        "attention": "sdpa",
        "peak_bytes": peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def run_child(options: Options) -> None:
    """Runs one side in this process and prints its results as the last line, in JSON."""
    config = config_of(options.presets[0], options)
    if options.child == "mtjax":
        result = run_mtjax(config, options.steps)
    else:
        result = run_torch(config, options.steps, compiled=options.child == "torch-compiled")
    print(json.dumps(result))


def start_child(side: str, preset: str, options: Options) -> dict[str, Any]:
    """Runs one side in a new process; if it fails, returns the last line of its output as error."""
    given = dataclasses.asdict(options) | {"presets": (preset,), "child": side}
    arguments = [preset]
    for name, value in given.items():
        if name not in ("presets", "sides") and value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip() or "no message").splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(preset: str, options: Options, console: Console) -> list[dict[str, Any]]:
    """Times all sides for one preset."""
    config = config_of(preset, options)
    config = configs.replace(config, vocab_size=config.model.vocab_size or 50257)
    have_torch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    sides = [side for side in options.sides if side == "mtjax" or have_torch]
    if not have_torch:
        console.print("torch and transformers are not installed: only mtjax runs")
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(options.turns):
        for side in sides:
            if not any("error" in result for result in turns[side]):
                with console.status(f"{preset}: {side}, run {turn + 1} of {options.turns}"):
                    turns[side].append(start_child(side, preset, options))
    return [summary(preset, side, config, turns[side]) for side in sides]


def summary(preset: str, side: str, config: Config, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Computes the median over the steps of all runs, and rates derived from it."""
    facts = {
        "preset": preset,
        "side": side,
        "batch": config.training.global_batch_size,
        "sequence": config.model.sequence_length,
        "compute_dtype": config.training.compute_dtype,
        "dropout": config.model.hidden_dropout,
    }
    errors = [turn["error"] for turn in turns if "error" in turn]
    if errors:
        return facts | {"error": errors[0]}
    seconds = statistics.median(s for turn in turns for s in turn["seconds"])
    samples = config.training.global_batch_size / seconds
    tokens = samples * config.model.sequence_length
    flops = samples * model_flops(anatomy_of(config.model)) / turns[0]["devices"]
    gpu = by_device_kind(turns[0]["device"])
    return facts | {
        "seconds": seconds,
        "cpu_seconds": statistics.median(s for turn in turns for s in turn["cpu_seconds"]),
        "spread": [min(s for t in turns for s in t["seconds"]), max(s for t in turns for s in t["seconds"])],
        "tokens_per_second": tokens,
        "tflops_per_device": flops / 1e12,
        "mfu": flops / gpu.peak_flops(config.training.compute_dtype) if gpu else None,
        **{name: turns[0][name] for name in ("peak_bytes", "device", "devices", "attention", "versions")},
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints a table in which each side is compared with eager PyTorch."""
    measures = ("s/step", "CPU s/step", "tokens/s", "TFLOP/s/device", "MFU", "peak GB", "time vs torch")
    table = Table("preset", "side", *measures)
    for row in rows:
        if "error" in row:
            table.add_row(row["preset"], row["side"], f"failed: {row['error'][:80]}")
            continue
        eager = [r["seconds"] for r in rows if r["preset"] == row["preset"] and r["side"] == "torch" and "seconds" in r]
        table.add_row(
            row["preset"],
            row["side"],
            f"{row['seconds']:.3f}",
            f"{row['cpu_seconds']:.3f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['tflops_per_device']:.3g}",
            f"{row['mfu']:.1%}" if row["mfu"] else "-",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['seconds'] / eager[0]:.2f}" if eager else "-",
        )
    console.print(table)


def main() -> None:
    """Times every preset on every side, prints a table and writes the results."""
    options = tyro.cli(Options, description=__doc__)
    if options.child:
        run_child(options)
        return
    console = Console()
    rows = [row for preset in options.presets for row in compare(preset, options, console)]
    show(rows, console)
    device = next((row["device"] for row in rows if "device" in row), "none")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"train_step-{device.replace(' ', '-')}.json"
    path.write_text(json.dumps({**surroundings(), "machine": platform.machine(), "rows": rows}, indent=1) + "\n")
    console.print(f"written to {path}")


def surroundings() -> dict[str, Any]:
    """Returns the date, this machine, its load and Python's version for a results file."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "load_average_5_minutes": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
    }


def processor() -> str:
    """Returns the CPU's name and the number of cores that this process may use."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
