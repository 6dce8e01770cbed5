"""Command-line options of benchmarks/gpu.py."""

from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Options:
    """Parts, time limit and output."""

    only: tuple[str, ...] = ()
    """Parts to run, by name; * is a wildcard: --only machine "speed gpt2-*"."""
    minutes: float = 15.0
    """Time limit in minutes for all parts."""
    out: Path | None = None
    """Folder for the results instead of benchmarks/results."""
    rehearse: bool = False
    """Run all parts with tiny shapes on the CPU; write no results."""
