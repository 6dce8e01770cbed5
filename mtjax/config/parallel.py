"""`[parallel]`: how work and memory are spread over devices."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.setting import seconds


@dataclass(frozen=True)
class Parallel:
    """How work and memory are spread over devices."""

    mesh: str = "1x1"
    """Devices as DATAxMODEL, say 64x8, or by name: data=64,model=8; auto (train and launch) takes the planner's fastest
    mesh of all devices."""
    sequence_parallel: bool = False
    """Split the residual stream over `model` along the sequence: norms, dropout and what is kept for the backward pass
    take 1/model of the memory, for the same number of bytes sent."""
    zero: Literal[0, 1, 2, 3] = 0
    """Split over `data` what every data rank would otherwise hold a copy of: 1 the optimizer's state, 2 also the
    gradients, 3 also the parameters (FSDP)."""
    overlap: bool = True
    """Ask XLA to overlap communication with computation (GPUs only)."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that were not started by Slurm, MPI or Kubernetes."""
    num_processes: int | None = None
    """Number of processes; goes with --coordinator."""
    process_id: int | None = None
    """Number of this process, from 0; goes with --coordinator."""
    peer_timeout: float = seconds(30.0)
    """Seconds within which all processes of a run end when one of them is lost."""
    step_timeout: float | None = seconds(None)
    """Seconds that a step may take before every process writes its Python stacks to the run's folder; ten times the
    median step, and at least 60, when not given."""
