"""Time of a layer of each letter of a hybrid model: Mamba-2, attention and an MLP of Nemotron-H 8B, side by side.

Compiles two layers of each for H100s, and runs nothing: the times are predictions of `mtjax inspect`, a walk over the
scheduled program. One sample of each length, no recompute, bfloat16.

    python benchmarks/hybrid.py [--rows 0 1] [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`: the compiler, and cuDNN for flash attention.
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
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write

SPLIT: dict[str, Any] = {"sequence_parallel": True}
ROWS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("1x1", 4096, {}),
    ("1x1", 4096, {"ssm_chunk": 64}),
    ("1x1", 4096, {"ssm_chunk": 256}),
    ("1x8", 4096, SPLIT),
    ("1x8", 32768, SPLIT),
    ("1x8", 131072, SPLIT),
    ("data=1,context=8,model=8", 131072, SPLIT),
)
"""Mesh, sequence length and other settings."""
TARGET = "h100x8"


@dataclass(frozen=True)
class Result:
    """A compiled program."""

    mesh: str
    sequence_length: int
    settings: dict[str, Any]
    milliseconds: dict[str, float]
    """Letter -> computing of a layer, forward and backward."""
    exposed: float
    """Milliseconds of the step in which computation waits for a collective."""
    contract_holds: bool
    compile_seconds: float


def config_of(mesh: str, length: int, settings: dict[str, Any]) -> Config:
    """Returns the config of a row."""
    base = config.load("nemotron-h-8b")
    ours = {"layer_pattern": "MM**--", "num_layers": 6, "vocab_size": 32768, "sequence_length": length, "mesh": mesh}
    plain = {"sequence_parallel": False, "zero": 0, "recompute": "none", "global_batch_size": 1, "microbatch_size": 1}
    return config.replace(base, **(ours | plain | settings))


def measure(mesh: str, length: int, settings: dict[str, Any]) -> Result:
    """Compiles one row of the table."""
    found = inspect(config_of(mesh, length, settings), find_target(TARGET))
    assert found.time is not None
    return Result(
        mesh=mesh,
        sequence_length=length,
        settings=settings,
        milliseconds={kind.letter: 1e3 * kind.each for kind in found.time.kinds.values()},
        exposed=1e3 * found.time.exposed,
        contract_holds=found.verdict.holds,
        compile_seconds=found.step.compile_seconds,
    )


def show(results: list[Result], console: Console) -> None:
    """Prints the table."""
    table = Table("mesh", "sequence", "settings", "M ms", "* ms", "- ms", "waiting ms", "contract", "compiled in s")
    for r in results:
        table.add_row(
            r.mesh,
            f"{r.sequence_length:,}",
            ", ".join(f"{k} {v}" for k, v in r.settings.items()),
            *(f"{r.milliseconds[letter]:.2f}" for letter in "M*-"),
            f"{r.exposed:.2f}",
            "holds" if r.contract_holds else "BROKEN",
            f"{r.compile_seconds:.0f}",
        )
    console.print("Milliseconds of a layer, forward and backward, predicted for", TARGET)
    console.print(table)


def main(
    out: Path = Path(__file__).parent / "results" / "hybrid.json", rows: tuple[int, ...] = tuple(range(len(ROWS)))
) -> None:
    """Compiles these rows, prints the table and updates the results file; other rows stay in it."""
    console = Console(width=160)
    before = [Result(**row) for row in json.loads(out.read_text())["results"]] if out.exists() else []
    results = {(r.mesh, r.sequence_length, str(r.settings)): r for r in before}
    for number in rows:
        mesh, length, settings = ROWS[number]
        with console.status(f"{mesh} {length} {settings}"):
            results[mesh, length, str(settings)] = measure(mesh, length, settings)
        found = {"date": date.today().isoformat(), "jax": jax.__version__, "target": TARGET}
        write(out, json.dumps({**found, "results": [asdict(r) for r in results.values()]}, indent=1))
    show(list(results.values()), console)


if __name__ == "__main__":
    tyro.cli(main)
