"""Memory per GPU by settings: compiled for H100, and by formula.

Compiles the 1.2B model on 64x1 and the 8.3B model on 64x8 of arXiv 1909.08053 (batch 512, microbatch 8, no attention
dropout), enabling sequence parallelism, ZeRO and recompute one after the other, checks each program's communication
contract, and prints the memory per GPU and the bytes that a GPU sends. Then the saved activations of a layer: the
difference between programs of 4 and 8 layers, and `34 s b h / t` (arXiv 2205.05198).

    python benchmarks/memory.py [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`: the compiler, and cuDNN for flash attention.
It takes half a minute per row on two cores.
"""

import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from mtjax import config
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write

TARGET = "h100x8"
MODELS = {"gpt2-1.2b": "64x1", "gpt2-8.3b": "64x8"}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"recompute": "full"},
    {"recompute": "full", "zero": 1},
    {"recompute": "full", "zero": 2},
    {"recompute": "full", "zero": 3},
    {"recompute": "full", "sequence_parallel": True},
    {"recompute": "full", "sequence_parallel": True, "zero": 1},
    {"recompute": "full", "sequence_parallel": True, "zero": 2},
    {"recompute": "full", "sequence_parallel": True, "zero": 3},
    {"recompute": "selective", "sequence_parallel": True, "zero": 2},
    {"recompute": "full", "sequence_parallel": True, "zero": 1, "microbatch_size": 2},
    {"recompute": "full", "sequence_parallel": True, "zero": 2, "microbatch_size": 2},
)
AIMS = {("gpt2-8.3b", 1): 9.5e9, ("gpt2-8.3b", 2): 6e9}
"""Target for bytes per GPU with sequence parallelism, full recompute and one microbatch, by ZeRO stage."""


@dataclass(frozen=True)
class Result:
    """A compiled program."""

    model: str
    mesh: str
    settings: dict[str, Any]
    contract_holds: bool
    arguments: int
    temporaries: int
    peak: int
    formula: float
    sent_over_model: float
    """Bytes that a GPU sends in a step, with ring algorithms."""
    sent_over_data: float
    collectives: dict[str, int]
    """Operations in a step, by kind and axes."""


def compiled(model: str, mesh: str, **settings: Any) -> Report:
    """Compiles a program without overlap, which would cost memory; returns the report."""
    run = config.replace(config.load(model), mesh=mesh, attention_dropout=0.0, overlap=False, **settings)
    return inspect(run, find_target(TARGET))


def measure(model: str, mesh: str, settings: dict[str, Any]) -> Result:
    """Compiles one row of the table."""
    report = compiled(model, mesh, **settings)
    counts: dict[str, int] = {}
    sent = {"model": 0.0, "data": 0.0}
    for row in report.rows:
        axes = "+".join(row.axes or ("?",))
        counts[f"{row.kind} {axes}"] = counts.get(f"{row.kind} {axes}", 0) + row.count
        if axes in sent:
            sent[axes] += row.count * row.wire_bytes
    memory = report.memory
    return Result(
        model=model,
        mesh=mesh,
        settings=settings,
        contract_holds=report.verdict.holds,
        arguments=memory.arguments,
        temporaries=memory.temporaries,
        peak=memory.peak,
        formula=memory.formula.total,
        sent_over_model=sent["model"],
        sent_over_data=sent["data"],
        collectives=counts,
    )


def saved_by_a_layer(recompute: str) -> tuple[float, float]:
    """Returns the bytes of saved activations of an 8.3B layer with sequence parallelism, and `34 s b h / t`."""
    short, long = (
        compiled("gpt2-8.3b", "64x8", recompute=recompute, sequence_parallel=True, zero=3, num_layers=n).memory
        for n in (4, 8)
    )
    run = config.load("gpt2-8.3b")
    theory = 34 * run.model.sequence_length * 8 * run.model.hidden_size / 8
    return (long.temporaries - short.temporaries) / 4, theory


def show(results: list[Result], console: Console) -> None:
    """Prints the table."""
    table = Table(
        "model", "settings", "state", "temporary", "peak", "formula", "aim", "sent: model", "data", "contract"
    )
    for r in results:
        aim = AIMS.get((r.model, r.settings.get("zero", 0)))
        applies = (
            aim
            and r.settings.get("sequence_parallel")
            and set(r.settings) == {"recompute", "sequence_parallel", "zero"}
        )
        table.add_row(
            f"{r.model} {r.mesh}",
            ", ".join(f"{k} {v}" for k, v in r.settings.items()),
            *(f"{n / 1e9:.2f}" for n in (r.arguments, r.temporaries, r.peak, r.formula)),
            f"{aim / 1e9:.1f}" if aim and applies and r.settings["recompute"] == "full" else "",
            *(f"{n / 1e9:.1f}" for n in (r.sent_over_model, r.sent_over_data)),
            "holds" if r.contract_holds else "BROKEN",
        )
    console.print("GB per GPU (10^9 bytes) and GB sent by a GPU in a step, compiled for", TARGET)
    console.print(table)


def main(
    out: Path = Path(__file__).parent / "results" / "memory.json", models: tuple[str, ...] = tuple(MODELS)
) -> None:
    """Compiles every row, prints the table and writes it."""
    console = Console(width=160)
    results = []
    for model in models:
        for settings in SETTINGS:
            if MODELS[model].endswith("x1") and settings.get("sequence_parallel"):
                continue  # sequence parallelism needs a tensor parallel degree above 1
            with console.status(f"{model} {settings}"):
                results.append(measure(model, MODELS[model], settings))
    show(results, console)
    layers = {kind: saved_by_a_layer(kind) for kind in ("full", "selective", "none")}
    for kind, (found, theory) in layers.items():
        console.print(f"a layer saves, recompute {kind}: {found / 1e6:.1f} MB; 34 s b h / t = {theory / 1e6:.1f} MB")
    document = {
        "date": date.today().isoformat(),
        "jax": jax.__version__,
        "target": TARGET,
        "results": [asdict(r) for r in results],
        "layer": {kind: {"kept": found, "theory": theory} for kind, (found, theory) in layers.items()},
    }
    write(out, json.dumps(document, indent=1))


if __name__ == "__main__":
    tyro.cli(main)
