"""Overlap of communication with computation: XLA's default schedule, and with the XLA options that mtjax sets.

Compiles for H100, and runs nothing: the times are predictions of `mtjax inspect`, a walk over the scheduled program.
`small` is 4 layers of 1024 on 2x4 GPUs of one server, one microbatch of 8; the 8.3B is that of arXiv 1909.08053 at
batch 512; Llama 2 7B has one sample of 4,096 tokens on each of 8 data parallel ranks.

    python benchmarks/overlap.py [--models small gpt2-8.3b llama2-7b] [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`: the compiler, and cuDNN for flash attention.
It takes 10 to 60 seconds per row on two cores.
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
from mtjax.config import Config
from mtjax.inspect.compiled import compile_program
from mtjax.inspect.report import report
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.xla_options import Chosen
from mtjax.train.step import make_train_step

TARGET = "h100x8"
SMALL: dict[str, Any] = {
    "mesh": "2x4",
    "num_layers": 4,
    "hidden_size": 1024,
    "num_heads": 16,
    "sequence_length": 1024,
    "vocab_size": 50257,
    "global_batch_size": 16,
}
MESHES = {"small": "2x4", "gpt2-8.3b": "64x8", "llama2-7b": "8x8"}
BATCHES = {"llama2-7b": {"global_batch_size": 8, "attention": "xla"}}
TENSOR: dict[str, Any] = {}
ZERO_1, ZERO_2, ZERO_3 = ({"sequence_parallel": True, "zero": stage} for stage in (1, 2, 3))
IN_HALF = {"grad_reduce_dtype": "bfloat16"}
XLAS_OWN, OURS = "its own", "ours"
ROWS: dict[str, list[dict[str, Any]]] = {
    "small": [TENSOR, ZERO_2],
    "gpt2-8.3b": [ZERO_2, ZERO_3, TENSOR],
    "llama2-7b": [TENSOR | IN_HALF, ZERO_3 | IN_HALF, ZERO_1 | IN_HALF, TENSOR, ZERO_3, ZERO_1],
}
"""Layouts of each model."""


@dataclass(frozen=True)
class Result:
    """A compiled program."""

    model: str
    mesh: str
    layout: dict[str, Any]
    options: str
    milliseconds: float
    exposed: float
    """Milliseconds of a step in which computation waits for a collective (exposed communication)."""
    hidden: float
    """Milliseconds of collectives that overlap with computation."""
    behind: int
    """Number of the `collectives` with computation between start and end."""
    collectives: int
    peak: int
    """Peak memory of a GPU in bytes."""
    contract_holds: bool
    compile_seconds: float


def config_of(model: str, layout: dict[str, Any]) -> Config:
    """Returns the config of a row."""
    base = config.replace(Config(), **SMALL) if model == "small" else config.load(model)
    settings = {
        "mesh": MESHES[model],
        "recompute": "full",
        "attention_dropout": 0.0,
        **BATCHES.get(model, {}),
        **layout,
    }
    return config.replace(base, **settings)


def measure(model: str, layout: dict[str, Any], options: str) -> Result:
    """Compiles one row of the table."""
    run, target = config_of(model, layout), find_target(TARGET)
    program = make_train_step(run, target.mesh(parse_mesh(run.parallel.mesh)))
    if options == XLAS_OWN:
        program.xla = Chosen({})
    found = report(compile_program(program, target))
    assert found.time is not None
    return Result(
        model=model,
        mesh=MESHES[model],
        layout=layout,
        options=options,
        milliseconds=1e3 * found.time.seconds,
        exposed=1e3 * found.time.exposed,
        hidden=1e3 * found.time.hidden,
        behind=sum(row.hidden for row in found.rows),
        collectives=sum(row.count for row in found.rows),
        peak=found.memory.peak,
        contract_holds=found.verdict.holds,
        compile_seconds=found.step.compile_seconds,
    )


def show(results: list[Result], console: Console) -> None:
    """Prints the table."""
    table = Table(
        "model", "layout", "XLA options", "step ms", "exposed", "hidden", "overlapped", "peak GB", "contract", "s"
    )
    for r in results:
        table.add_row(
            f"{r.model} {r.mesh}",
            ", ".join(f"{k} {v}" for k, v in r.layout.items()) or "tensor",
            r.options,
            *(f"{n:.2f}" for n in (r.milliseconds, r.exposed, r.hidden)),
            f"{r.behind} of {r.collectives}",
            f"{r.peak / 1e9:.2f}",
            "holds" if r.contract_holds else "BROKEN",
            f"{r.compile_seconds:.0f}",
        )
    console.print("Milliseconds of a step, predicted for", TARGET)
    console.print(table)


def main(out: Path = Path(__file__).parent / "results" / "overlap.json", models: tuple[str, ...] = tuple(ROWS)) -> None:
    """Compiles the rows of `models`, prints the table and updates the results file; other models' rows stay in it."""
    console = Console(width=160)
    before = json.loads(out.read_text())["results"] if out.exists() else []
    results = [Result(**row) for row in before if row["model"] not in models]
    for model in models:
        for layout in ROWS[model]:
            for name in (XLAS_OWN, OURS):
                with console.status(f"{model} {layout} {name}"):
                    results.append(measure(model, layout, name))
                found = {"date": date.today().isoformat(), "jax": jax.__version__, "target": TARGET}
                write(out, json.dumps({**found, "results": [asdict(r) for r in results]}, indent=1))
    show(results, console)


if __name__ == "__main__":
    tyro.cli(main)
