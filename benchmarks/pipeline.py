"""What a schedule costs on a pipeline of virtual CPU devices, against its timetable.

    python benchmarks/pipeline.py [--turns 5] [--out FILE.json]

Eight virtual CPU devices, mesh data=2,stage=4,model=1, 8 layers, full recompute; 1F1B, interleaved (two chunks on each
stage) and GPipe with 4, 8 and 32 microbatches of one sample. Three things are
compared with the timetables of `mtjax.theory.timetable`:

- the trip counts of the compiled program's loops, and the permutes in them: both must be those of the table;
- a step's time with that of 32 microbatches of the same schedule, and with that of 1F1B with as many microbatches:
  ticks predict both ratios;
- a step's time with what a line through those of 4 and 32 microbatches says of its ticks: a step also has work that
  does not depend on them, the optimizer's above all, and it weighs more where there are few.

The devices share the machine's cores, so nothing is gained from having several, and a stage that is idle computes what
nobody reads: a tick costs the same in the warm-up as in the steady state, which is what lock step costs on real devices
too. An interleaved tick runs one layer where the others run two: in units of whole stages, ticks are divided by the
chunks. Programs take turns, so that a slow minute of the machine hits all; CPU seconds are of all cores, and say the
same on a busy machine. The results, with hardware, versions and date, go to benchmarks/results/pipeline-cpu.json.
"""

import datetime
import json
import platform
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from train_step import processor

from mtjax import config
from mtjax.config import Config
from mtjax.inspect import hlo
from mtjax.inspect.hlo_walk import walk
from mtjax.sharding.mesh import attach_devices
from mtjax.sharding.placement import global_batch
from mtjax.theory.mesh import parse_mesh
from mtjax.theory.timetable import Timetable, timetable
from mtjax.train.step import TrainStep, make_train_step

DATA, STAGES = 2, 4
MESH = f"data={DATA},stage={STAGES},model=1"
MODEL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 128,
    "num_heads": 4,
    "sequence_length": 128,
    "vocab_size": 512,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "compute_dtype": "float32",
    "microbatch_size": 1,
    "recompute": "full",
}
SCHEDULES = {"1f1b": 1, "interleaved": 2, "gpipe": 1}
"""And the chunks on each stage."""
MICROBATCHES = (4, 8, 32)


@dataclass
class Run:
    """A compiled program that can be timed."""

    schedule: str
    microbatches: int
    table: Timetable
    program: TrainStep
    loops: list[int]
    """Trip counts of the compiled loops that permute."""
    permutes: int
    """Executions in a step."""
    seconds: list[float]
    cpu_seconds: list[float]

    def __post_init__(self) -> None:
        size = self.program.config.training.global_batch_size
        text = np.random.default_rng(0).integers(0, 512, (size, MODEL["sequence_length"] + 1), dtype=np.int32)
        arrays = {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "loss_mask": np.ones(text[:, 1:].shape, np.float32),
            "sample_index": np.arange(size, dtype=np.uint32),
        }
        self.state, self.batch = self.program.initialize(0), global_batch(self.program.batch_sharding, arrays, size)

    @property
    def cpu(self) -> float:
        """Median CPU seconds of a step."""
        return statistics.median(self.cpu_seconds)

    def step(self) -> None:
        """One step, timed."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def config_of(schedule: str, microbatches: int) -> Config:
    """A run of the model."""
    mine = {"pipeline_schedule": schedule, "chunks": SCHEDULES[schedule], "mesh": MESH}
    return config.replace(config.Config(), **MODEL, **mine, global_batch_size=DATA * microbatches)


def compile_run(schedule: str, microbatches: int) -> Run:
    """Compiles a program and counts its ticks."""
    run = config_of(schedule, microbatches)
    program = make_train_step(run, attach_devices(parse_mesh(MESH)))
    loops, permutes = compiled_ticks(program.lower_step().compile().as_text() or "")
    table = timetable(run.parallel.pipeline_schedule, STAGES, microbatches, SCHEDULES[schedule])
    return Run(schedule, microbatches, table, program, loops, permutes, [], [])


def compiled_ticks(text: str) -> tuple[list[int], int]:
    """Trip counts of the innermost loops that permute, in order, and executions of permutes."""
    loops: Counter[str] = Counter()
    permutes = 0
    for site in walk(hlo.parse(text)):
        if site.instruction.opcode.removesuffix("-start") == "collective-permute":
            loops[site.computation.name] = site.count
            permutes += site.count
    return list(loops.values()), permutes


def ticks(table: Timetable) -> float:
    """Forward and backward halves of a step, in pairs, in units of whole stages."""
    return (table.forward_ticks + table.backward_ticks) / 2 / table.chunks


def fixed_and_tick(shortest: Run, longest: Run) -> tuple[float, float]:
    """CPU seconds of a step without ticks, and of a tick: the line through two runs."""
    tick = (longest.cpu - shortest.cpu) / (ticks(longest.table) - ticks(shortest.table))
    return longest.cpu - tick * ticks(longest.table), tick


def row(run: Run, runs: list[Run]) -> dict[str, Any]:
    """A run's numbers, beside those of other runs."""
    table, wall, cpu = run.table, min(run.seconds), run.cpu
    alike = sorted((r for r in runs if r.schedule == run.schedule), key=lambda r: r.microbatches)
    (plain,) = (r for r in runs if r.schedule == "1f1b" and r.microbatches == run.microbatches)
    longest = alike[-1]
    fixed, tick = fixed_and_tick(alike[0], longest)
    predicted = ticks(table) / ticks(longest.table)
    return {
        "schedule": run.schedule,
        "chunks": table.chunks,
        "microbatches": run.microbatches,
        "ticks": len(table.forward),
        "forward_halves": table.forward_ticks,
        "backward_halves": table.backward_ticks,
        "loops_of_the_table": [phase.stop - phase.start for phase in table.phases],
        "compiled_loops": run.loops,
        "compiled_permutes": run.permutes,
        "bubble": table.bubble,
        "seconds": wall,
        "cpu_seconds": cpu,
        "ticks_of_whole_stages": ticks(table),
        "fixed_cpu_seconds": fixed,
        "cpu_seconds_of_a_tick": tick,
        "predicted_ratio": predicted,
        "measured_ratio": wall / min(longest.seconds),
        "measured_cpu_ratio": cpu / longest.cpu,
        "measured_over_predicted": cpu / longest.cpu / predicted,
        "measured_over_line": cpu / (fixed + tick * ticks(table)),
        "predicted_over_1f1b": ticks(table) / ticks(plain.table),
        "measured_over_1f1b": cpu / plain.cpu,
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Prints the table."""
    heads = ("schedule", "m", "loops: table", "compiled", "permutes", "bubble", "s/step", "CPU s", "of a tick")
    ratios = ("predicted", "wall", "CPU", "CPU / predicted", "CPU / line", "to 1F1B: predicted", "CPU")
    table = Table(*heads, *ratios)
    for r in rows:
        table.add_row(
            r["schedule"],
            str(r["microbatches"]),
            "+".join(map(str, r["loops_of_the_table"])),
            "+".join(map(str, r["compiled_loops"])),
            str(r["compiled_permutes"]),
            f"{r['bubble']:.1%}",
            *(f"{r[name]:.3f}" for name in ("seconds", "cpu_seconds", "cpu_seconds_of_a_tick")),
            *(f"{r[name]:.3f}" for name in ("predicted_ratio", "measured_ratio", "measured_cpu_ratio")),
            *(f"{r[name]:.3f}" for name in ("measured_over_predicted", "measured_over_line")),
            *(f"{r[name]:.3f}" for name in ("predicted_over_1f1b", "measured_over_1f1b")),
        )
    console.print("Steps; their time over that of 32 microbatches, and over 1F1B's: by ticks, and measured")
    console.print(table)


def main(turns: int = 5, out: Path = Path(__file__).parent / "results" / "pipeline-cpu.json") -> None:
    """Compiles and times all programs, prints the table and writes it."""
    console = Console(width=200)
    runs: list[Run] = []
    for schedule in SCHEDULES:
        for microbatches in MICROBATCHES:
            with console.status(f"compiling {schedule}, {microbatches} microbatches"):
                runs.append(compile_run(schedule, microbatches))
                runs[-1].step()
                runs[-1].seconds.clear()
                runs[-1].cpu_seconds.clear()
    for turn in range(turns):
        with console.status(f"turn {turn + 1} of {turns}"):
            for run in runs:
                run.step()
    rows = [row(run, runs) for run in runs]
    show(rows, console)
    about = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "mesh": MESH,
        "model": MODEL,
        "turns": turns,
    }
    out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    tyro.cli(main)
