"""Cost of pipeline schedules on virtual CPU devices, compared with their timetables.

    python benchmarks/pipeline.py [--turns 5] [--out FILE.json]

Eight virtual CPU devices, mesh data=2,stage=4,model=1, 8 layers, full recompute; 1F1B, interleaved (two chunks on each
stage) and GPipe with 4, 8 and 32 microbatches of one sample. Three things are compared with the timetables of
`mtjax.layout.timetable`:

- the trip counts of the compiled program's loops, and their permutes: both must equal those of the timetable;
- a step's time relative to 32 microbatches of the same schedule, and relative to 1F1B with as many microbatches: the
  numbers of ticks predict both ratios;
- a step's time relative to a line through the times of 4 and 32 microbatches: a step also has work that does not depend
  on the number of ticks, above all the optimizer's, which weighs more if there are few ticks.

The devices share the machine's cores, so multiple devices give no speedup, and an idle stage computes results that
nothing reads: a tick costs the same in the warm-up as in the steady state, as does lockstep on real devices. An
interleaved tick runs one layer where the other schedules run two: in units of full stages, ticks are divided by the
number of chunks. Programs alternate, so that temporary load on the machine affects all; CPU seconds are of all cores,
and do not depend on other load. Results, with hardware, versions and date, go to benchmarks/results/pipeline-cpu.json.
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
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.timetable import Timetable, timetable
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.global_batch import global_batch
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
"""Number of chunks on each stage, by schedule."""
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
    """Permutes executed in a step."""
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
        """Runs and times a step."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.state, metrics = self.program.step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


def config_of(schedule: str, microbatches: int) -> Config:
    """Returns the config of a run."""
    settings = {"pipeline_schedule": schedule, "chunks": SCHEDULES[schedule], "mesh": MESH}
    return config.replace(config.Config(), **MODEL, **settings, global_batch_size=DATA * microbatches)


def compile_run(schedule: str, microbatches: int) -> Run:
    """Compiles a program and counts its ticks."""
    run = config_of(schedule, microbatches)
    program = make_train_step(run, attach_devices(parse_mesh(MESH)))
    loops, permutes = compiled_ticks(program.lower_step().compile().as_text() or "")
    table = timetable(run.parallel.pipeline_schedule, STAGES, microbatches, SCHEDULES[schedule])
    return Run(schedule, microbatches, table, program, loops, permutes, [], [])


def compiled_ticks(text: str) -> tuple[list[int], int]:
    """Returns trip counts of the innermost loops with permutes, in order, and the number of permutes executed."""
    loops: Counter[str] = Counter()
    permutes = 0
    for site in walk(hlo.parse(text)):
        if site.instruction.opcode.removesuffix("-start") == "collective-permute":
            loops[site.computation.name] = site.count
            permutes += site.count
    return list(loops.values()), permutes


def ticks(table: Timetable) -> float:
    """Returns the number of ticks (pairs of a forward and a backward half), in units of full stages."""
    return (table.forward_ticks + table.backward_ticks) / 2 / table.chunks


def fixed_and_tick(shortest: Run, longest: Run) -> tuple[float, float]:
    """Fits a line through two runs; returns the CPU seconds of a step without ticks, and of a tick."""
    tick = (longest.cpu - shortest.cpu) / (ticks(longest.table) - ticks(shortest.table))
    return longest.cpu - tick * ticks(longest.table), tick


def row(run: Run, runs: list[Run]) -> dict[str, Any]:
    """Returns a run's numbers, compared with other runs."""
    table, wall, cpu = run.table, min(run.seconds), run.cpu
    same_schedule = sorted((r for r in runs if r.schedule == run.schedule), key=lambda r: r.microbatches)
    (plain,) = (r for r in runs if r.schedule == "1f1b" and r.microbatches == run.microbatches)
    longest = same_schedule[-1]
    fixed, tick = fixed_and_tick(same_schedule[0], longest)
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
    heads = ("schedule", "m", "loops: table", "compiled", "permutes", "bubble", "s/step", "CPU s", "per tick")
    ratios = ("predicted", "wall", "CPU", "CPU / predicted", "CPU / line", "vs 1F1B: predicted", "CPU")
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
    console.print("Steps; time relative to 32 microbatches, and to 1F1B: predicted from ticks, and measured")
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
        with console.status(f"round {turn + 1} of {turns}"):
            for run in runs:
                run.step()
    rows = [row(run, runs) for run in runs]
    show(rows, console)
    facts = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "mesh": MESH,
        "model": MODEL,
        "turns": turns,
    }
    out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    tyro.cli(main)
