"""A loop within a layer whose steps are short kernels, each of which takes its latency whatever it computes."""

from dataclasses import dataclass

Matmuls = tuple[tuple[float, float, float, float], ...]
"""(m, k, n, batch) each: `batch` matmuls [m,k] x [k,n] in one kernel."""


@dataclass(frozen=True)
class Loop:
    """A loop over pieces of a sample, on one device."""

    steps: float
    forward: Matmuls
    """Of a step."""
    backward: Matmuls
    kernels: tuple[int, int]
    """Other kernels of a step, forward and backward: slices of what it reads, sums, what it writes."""
