"""A loop within a layer whose steps are short kernels, each of which takes its latency whatever it computes."""

from collections.abc import Sequence
from dataclasses import dataclass

Matmuls = tuple[tuple[float, float, float, float], ...]
"""(m, k, n, batch) each: `batch` matmuls [m,k] x [k,n] in one kernel."""


@dataclass(frozen=True)
class LoopOverPieces:
    """A loop over pieces of a sample, on one device."""

    steps: float
    forward: Matmuls
    """Of a step, which the backward pass runs again."""
    again: Matmuls
    """Of those, the ones that a step's gradients need once more."""
    gradients: Matmuls
    """In float32."""
    kernels: tuple[Sequence[float], Sequence[float]]
    """Bytes of the other kernels of a step, forward and backward: slices of what it reads, sums, what it writes."""
