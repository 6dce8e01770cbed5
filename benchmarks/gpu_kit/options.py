"""The kit's command line."""

from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Options:
    """What to run, and where the results go."""

    only: tuple[str, ...] = ()
    """Parts to run, by name; * stands for anything: --only machine "speed gpt2-*"."""
    minutes: float = 7.5
    """No part begins or goes on later than this."""
    out: Path | None = None
    """Folder for the results instead of benchmarks/results."""
    rehearse: bool = False
    """Tiny shapes on the CPU, to the last line; no number is kept."""
