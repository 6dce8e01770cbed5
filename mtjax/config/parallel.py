"""`[parallel]`: how work and memory are spread over devices."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import LAYERS, WIDTH, at_least, numbers, seconds


@dataclass(frozen=True)
class Parallel:
    """How work and memory are spread over devices."""

    mesh: str = "1x1"
    """Devices as DATAxMODEL, say 64x8, as DATAxSTAGExMODEL, 8x4x8, as DATA, 8, or by name: data=8,stage=4,model=8, or
    data=2,context=4,model=8, where 4 ranks share the tokens of each sample, or data=2,expert=8,model=1, where 8
    ranks have samples and experts of their own. dp, pp, cp, ep and tp are other names of data, stage, context, expert
    and model. auto (train and launch) takes the planner's fastest mesh of all devices."""
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = "1f1b"
    """Order of microbatches on the stages of a pipeline: 1f1b begins each backward pass as soon as it can; interleaved
    does so with several chunks of layers on each stage, which makes the bubble smaller; gpipe runs all forward passes
    first."""
    chunks: int = at_least(1, 1, most=LAYERS)
    """Chunks of layers on each stage, for the interleaved pipeline schedule."""
    layers_per_stage: tuple[int, ...] | None = numbers(0, None, most=LAYERS, length=LAYERS)
    """Layers of each stage, where they are not equal: 5,6,6,5."""
    sequence_parallel: bool = False
    """Split the residual stream over `model` along the sequence: norms, dropout and what is kept for the backward pass
    take 1/model of the memory, for the same number of bytes sent."""
    context_method: Literal["ring", "all-gather"] = "ring"
    """How keys and values come to the queries of other ranks over `context`: ring sends them from rank to rank while
    attention computes, all-gather sends all of them to all before it."""
    expert_dispatch: Literal["all-gather", "all-to-all"] = "all-gather"
    """How tokens come to the experts of other ranks over `expert`: all-gather sends all tokens to all ranks, all-to-all
    each token to the ranks that hold its experts. No token is lost either way."""
    zero: Literal[0, 1, 2, 3] = 0
    """Split over `data`, `context` and `expert` what every rank would otherwise hold a copy of: 1 the optimizer's
    state with the float32 parameters, gathered once a step; 2 also the gradients; 3 gathers layer by layer, in each
    microbatch (FSDP)."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over data ranks, and over the stages of a pipeline where these share a
    parameter: bfloat16 sends half the bytes. Microbatches are added up in float32 either way."""
    overlap: bool = True
    """Ask XLA to overlap communication with computation (GPUs only)."""
    coordinator: str | None = None
    """host:port of process 0, for several processes that were not started by torchrun, Slurm, MPI or Kubernetes."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; goes with --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Number of this process, from 0; goes with --coordinator."""
    peer_timeout: float = seconds(30.0)
    """Seconds within which all processes of a run end when one of them is lost."""
    step_timeout: float | None = seconds(None)
    """Seconds that a step may take before every process writes its Python stacks to the run's folder; ten times the
    median step, and at least 60, when not given."""
