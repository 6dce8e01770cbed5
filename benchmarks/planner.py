"""The planner's time of a step beside that of the compiled program.

Compiles each program for H100s and runs nothing: the planner adds up formulas, `mtjax inspect --kernels` walks the
scheduled program with the machine code of its kernels. Both are predictions from the same constants.

    python benchmarks/planner.py [--programs mixtral-8x7b gpt-76b] [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`. 10 to 90 CPU seconds for each program; rows that are compiled again replace
those in the file, the others stay. `--formulas` compiles nothing, and compares formulas with the programs of the file.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.timing import StepTime, step_time
from mtjax.config import Config
from mtjax.inspect.predict import TimeReport
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

TARGET = "h100x8"
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-8.3b": ("gpt2-8.3b", {}),
    "gpt-76b": ("gpt-76b", {}),
    "bert-336m": ("bert-336m", {}),
    "t5-large": ("t5-large", {}),
    "t5-220m": ("t5-220m", {}),
    "llama2-7b, ZeRO-3 on a server": (
        "llama2-7b",
        {"mesh": "8x1", "zero": 3, "recompute": "selective", "global_batch_size": 16, "microbatch_size": 2},
    ),
    "llama3-8b": ("llama3-8b", {}),
    "llama3-8b, ZeRO-3 on 8x8": ("llama3-8b", {"mesh": "8x8", "sequence_parallel": True, "zero": 3}),
    "olmo2-7b": ("olmo2-7b", {}),
    "mixtral-8x7b": ("mixtral-8x7b", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "nemotron-h-8b": ("nemotron-h-8b", {}),
}
"""Name of a row -> preset and settings that replace its own."""


@dataclass(frozen=True)
class Arguments:
    """What to compile."""

    programs: tuple[str, ...] = tuple(PROGRAMS)
    formulas: bool = False
    out: Path = Path(__file__).parent / "results" / "planner.json"


def config_of(program: str) -> Config:
    """Returns the config of a row."""
    preset, settings = PROGRAMS[program]
    return config.replace(config.load(preset), **settings)


def formula(run: Config) -> StepTime:
    """Returns the planner's time of a run's step."""
    return step_time(anatomy_of(run.model), Plan.of(run, parse_mesh(run.parallel.mesh)), DGX_H100)


def row_of(found: TimeReport, seconds: float) -> dict[str, Any]:
    """Returns what the file keeps of a compiled step."""
    assert found.kernels is not None
    causes: dict[str, float] = {}
    for each in found.causes.values():
        for cause, spent in each.items():
            causes[cause] = causes.get(cause, 0.0) + spent
    return {
        "seconds": found.seconds,
        "without_instructions": found.kernels.without,
        "products": found.products,
        "products_by_phase": {phase: spent.products for phase, spent in found.phases.items() if spent.products},
        "memory_bound": found.memory_bound,
        "causes": causes,
        "exposed": found.exposed_by_axes,
        "hidden": found.hidden_by_axes,
        "contention": found.contention,
        "seconds_to_inspect": round(seconds, 1),
    }


def show(name: str, row: dict[str, Any], planned: StepTime) -> None:
    """Prints a row: both times and their parts in milliseconds."""
    print(f"{name}: {1e3 * row['seconds']:.1f} ms compiled, {planned.total / row['seconds'] - 1:+.1%} by formula")
    parts = {k: v for k, v in asdict(planned).items() if isinstance(v, float) and v}
    print("  formula: ", ", ".join(f"{k} {1e3 * v:.1f}" for k, v in parts.items()))
    spent = {"products": row["products"], **row["causes"], "contention": row["contention"]}
    spent |= {f"exposed over {axes}": seconds for axes, seconds in row["exposed"].items()}
    print("  compiled:", ", ".join(f"{k} {1e3 * v:.1f}" for k, v in spent.items() if v > 1e-4))


def main(arguments: Arguments) -> None:
    path = arguments.out
    known = json.loads(path.read_text())["rows"] if path.is_file() else {}
    if unknown := [name for name in arguments.programs if name not in PROGRAMS]:
        names = "; ".join(PROGRAMS)
        print(f"--programs {unknown[0]!r} is not a program of this benchmark, which are: {names}", file=sys.stderr)
        sys.exit(2)
    for name in arguments.programs:
        if arguments.formulas and name not in known:
            print(f"{name}: not in {path}, run without --formulas to compile it")
            continue
        run = config_of(name)
        if not arguments.formulas:
            start = time.process_time()
            found = inspect(run, find_target(TARGET), kernels=True).time
            assert found is not None
            known[name] = row_of(found, time.process_time() - start)
            about = {"date": date.today().isoformat(), "jax": version("jax"), "target": TARGET, "rows": known}
            write(path, json.dumps(about, indent=1) + "\n")
        show(name, known[name], formula(run))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
