"""FP8 by recipe, model and mesh: step time, memory, waiting for communication and matmuls in 8 bits.

Compiles the train step of GPT-2 1.2B, Llama 3 8B and GPT-2 8.3B for H100s, with full recompute, and runs nothing: the
times are predictions of `mtjax inspect`, a walk over the scheduled program. 64 samples a step: of 8,192 tokens one by
one, of 1,024 tokens 8 at a time. GPT-2 without dropout of attention scores, so that flash attention computes them.

    python benchmarks/float8_time.py [--models llama3-8b] [--meshes 8x1] [--recipes none delayed] [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`: the compiler, and cuDNN for flash attention.
"""

import json
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from mtjax import config
from mtjax.config import Config
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write

TARGET = "h100x8"
GPT: dict[str, Any] = {"microbatch_size": 8, "attention_dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {"llama3-8b": {"microbatch_size": 1}, "gpt2-1.2b": GPT, "gpt2-8.3b": GPT}
MESHES: dict[str, dict[str, Any]] = {
    "8x1": {"zero": 3},
    "8x8": {"zero": 1, "sequence_parallel": True},
}
RECIPES = ("none", "tensorwise", "delayed", "rowwise")
TENSOR_PARALLEL = ("8x8",)
"""Meshes with tensor parallelism, which `rowwise` does not support."""


@dataclass(frozen=True)
class Result:
    """A compiled program."""

    model: str
    mesh: str
    recipe: str
    milliseconds: float
    """Of a step."""
    products: float
    """Milliseconds of matmuls."""
    memory_bound: float
    """Milliseconds of other kernels."""
    exposed: float
    """Milliseconds in which computation waits for a collective."""
    contention: float
    """Milliseconds by which overlapped collectives slow computation down."""
    peak: int
    """Bytes on a GPU."""
    temporaries: int
    """Bytes among them that are not the state."""
    formula: float
    """The peak by formula."""
    in_8_bits: int
    """Matmuls of layers in 8 bits, in a step on a GPU."""
    expected: int
    """Matmuls of layers that should be."""
    share: float
    """Of the FLOPs in 8 bits."""
    contract_holds: bool
    compile_seconds: float
    jax: str
    date: str


def config_of(model: str, mesh: str, recipe: str) -> Config:
    """Returns the config of a row."""
    common = {"mesh": mesh, "fp8": recipe, "global_batch_size": 64, "recompute": "full"}
    return config.replace(config.load(model), **(common | MODELS[model] | MESHES[mesh]))


def measure(model: str, mesh: str, recipe: str) -> Result:
    """Compiles one row of the table."""
    found = inspect(config_of(model, mesh, recipe), find_target(TARGET))
    time, memory, eight = found.time, found.memory, found.float8
    assert time is not None
    return Result(
        model=model,
        mesh=mesh,
        recipe=recipe,
        milliseconds=1e3 * time.seconds,
        products=1e3 * time.products,
        memory_bound=1e3 * time.memory_bound,
        exposed=1e3 * time.exposed,
        contention=1e3 * time.contention,
        peak=memory.peak,
        temporaries=memory.temporaries,
        formula=memory.formula.total,
        in_8_bits=eight.found if eight else 0,
        expected=eight.expected if eight else 0,
        share=eight.share if eight else 0.0,
        contract_holds=found.verdict.holds,
        compile_seconds=found.step.compile_seconds,
        jax=jax.__version__,
        date=date.today().isoformat(),
    )


def show(results: list[Result], console: Console) -> None:
    """Prints the table."""
    table = Table(
        *("model", "mesh", "fp8", "step ms", "matmuls", "memory-bound", "waiting", "slowed", "peak GB", "formula"),
        *("in 8 bits", "of FLOPs", "contract", "compiled in s"),
    )
    for r in results:
        table.add_row(
            *(r.model, r.mesh, r.recipe),
            *(f"{ms:,.0f}" for ms in (r.milliseconds, r.products, r.memory_bound, r.exposed, r.contention)),
            *(f"{size / 1e9:.2f}" for size in (r.peak, r.formula)),
            f"{r.in_8_bits:,} of {r.expected:,}",
            f"{r.share:.1%}",
            "holds" if r.contract_holds else "BROKEN",
            f"{r.compile_seconds:.0f}",
        )
    console.print("Milliseconds of a step, predicted for", TARGET)
    console.print(table)


def main(
    out: Path = Path(__file__).parent / "results" / "float8_time.json",
    models: tuple[str, ...] = tuple(MODELS),
    meshes: tuple[str, ...] = tuple(MESHES),
    recipes: tuple[str, ...] = RECIPES,
) -> None:
    """Compiles these rows, prints the table and updates the results file; other rows stay in it."""
    console = Console(width=180)
    before = [Result(**row) for row in json.loads(out.read_text())["results"]] if out.exists() else []
    results = {(r.model, r.mesh, r.recipe): r for r in before}
    for row in product(models, meshes, recipes):
        if row[1] in TENSOR_PARALLEL and row[2] == "rowwise":
            continue
        with console.status(" ".join(row)):
            results[row] = measure(*row)
        document = {"target": TARGET, "results": [asdict(r) for r in results.values()]}
        write(out, json.dumps(document, indent=1))
    show(list(results.values()), console)


if __name__ == "__main__":
    tyro.cli(main)
