"""Start-up time of a run, with and without a compilation cache; and of `--help`.

    python benchmarks/startup.py              # first and second start of the default run, then each command's help

Each start is `mtjax train --steps 1` in a separate process, timed until it returns, and until it reports its first step
(and validation). The text is prepared before, so the starts differ only in the compilation cache: `off`, `first` (an
empty folder), `second` (the same folder again), and `after compile` (a folder filled by `mtjax compile` only). Each
time is the best of several interleaved tries. Results go to `benchmarks/results/startup-cpu.json`.
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mtjax.cli import COMMANDS

RESULTS = Path(__file__).parent / "results" / "startup-cpu.json"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how long a run takes to start.")
    parser.add_argument("--tries", type=int, default=3, help="number of tries, of which the best counts")
    tries = parser.parse_args().tries
    with tempfile.TemporaryDirectory() as folder:
        starts = best_of(tries, lambda: measure_starts(Path(folder)))
    helps = best_of(tries, lambda: {name: timed(name, "--help") for name in COMMANDS})
    result = {"starts": starts, "help": helps, "measured": circumstances()}
    print(json.dumps(result, indent=1))
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def measure_starts(folder: Path) -> dict[str, dict[str, Any]]:
    programs, compiled = folder / "programs", folder / "compiled"
    for path in (programs, compiled):
        shutil.rmtree(path, ignore_errors=True)
    timed("train", "--steps", "1", "--compile-cache", "off", "--out", fresh(folder))  # prepares the text
    timed("compile", "--steps", "1", "--compile-cache", str(compiled))
    caches = {"off": "off", "first": programs, "second": programs, "after compile": compiled}
    return {
        name: timed("train", "--steps", "1", "--compile-cache", str(cache), "--out", fresh(folder))
        for name, cache in caches.items()
    }


def fresh(folder: Path) -> str:
    return tempfile.mkdtemp(dir=folder, prefix="run-")


def timed(*arguments: str) -> dict[str, Any]:
    """Runs a command; returns wall-clock and CPU seconds, the time of its first step, and its `time` line."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    first_step, time_line = {}, {}
    with subprocess.Popen([sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("step ") and not first_step:
                first_step = {"first_step": round(time.perf_counter() - start, 2)}
            if match := re.match(r"time +(.*)", line):
                time_line = {"time": match[1]}
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    return {"seconds": round(seconds, 2), "cpu_seconds": round(spent, 2)} | first_step | time_line


RUN = "import sys; from mtjax.cli import main; sys.exit(main())"


def best_of(tries: int, measure: Any) -> dict[str, dict[str, Any]]:
    """Returns the fastest try of each measurement."""
    all_tries = [measure() for _ in range(tries)]
    return {name: min((one[name] for one in all_tries), key=lambda m: m["seconds"]) for name in all_tries[0]}


def circumstances() -> dict[str, Any]:
    import jax

    cpu = next((line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name")), "")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main()
