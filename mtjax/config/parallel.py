"""`[parallel]`: the mesh, parallelism and communication."""

from dataclasses import dataclass
from typing import Literal

from mtjax.config.field_metadata import LAYERS, WIDTH, at_least, numbers, seconds


@dataclass(frozen=True)
class Parallel:
    """The mesh, parallelism and communication."""

    mesh: str = "1x1"
    """Parallelism degrees: DATAxTENSOR (64x8), DATAxPIPELINExTENSOR (8x4x8), DATA (8), or by axis name, such as
    data=8,stage=4,model=8. The axes are data (data parallelism, also dp or dp_replicate), stage (pipeline, pp), shard
    (data parallel ranks of a group within which --zero shards, dp_shard or fsdp), context (context parallelism, cp),
    expert (expert parallelism, ep) and model (tensor parallelism, tp). auto (train and launch only) uses the fastest
    mesh that mtjax plan estimates for all devices."""
    pipeline_schedule: Literal["1f1b", "interleaved", "gpipe"] = "1f1b"
    """Pipeline schedule: 1f1b; interleaved, 1f1b with several chunks of layers per stage and so a smaller bubble
    (Megatron's virtual pipeline stages); or gpipe, all forward passes before the backward passes."""
    chunks: int = at_least(1, 1, most=LAYERS)
    """Number of layer chunks per stage for the interleaved schedule (virtual stages; Megatron's
    --num-virtual-stages-per-pipeline-rank)."""
    layers_per_stage: tuple[int, ...] | None = numbers(0, None, most=LAYERS, length=LAYERS)
    """Number of layers of each pipeline stage where they are not equal, such as 5,6,6,5."""
    sequence_parallel: bool = False
    """Megatron's sequence parallelism: shard the residual stream along the sequence over the tensor parallel ranks, so
    that norms, dropout and saved activations need less memory; the communication volume is the same."""
    tensor_layout: Literal["1d", "2d"] = "1d"
    """Tensor parallelism: 1d shards heads, MLP and vocabulary (Megatron); 2d also the width of the residual stream,
    and with --zero 3 every matrix in blocks over two axes (2D tensor parallelism; 2.5D with shard in the mesh)."""
    context_method: Literal["ring", "all-gather"] = "ring"
    """How context parallel ranks exchange keys and values: ring sends them from rank to rank while attention computes
    (Megatron's cp_comm_type p2p), all-gather gathers them before attention."""
    expert_dispatch: Literal["all-gather", "all-to-all"] = "all-gather"
    """How tokens reach the experts of other expert parallel ranks: all-gather sends all tokens to all ranks, all-to-all
    sends each token only to the ranks of its experts (Megatron's --moe-token-dispatcher-type). Neither drops tokens."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards the optimizer state and the float32 parameters over data, context and expert parallel ranks
    (Megatron's distributed optimizer), or with shard in the mesh over those of a group; 2 also shards the gradients; 3
    also all-gathers the parameters layer by layer in each microbatch (FSDP)."""
    offload: Literal["none", "optimizer", "optimizer,parameters"] = "none"
    """Keep AdamW's moments in the host's pinned memory, and stream them through the update layer by layer: 8 bytes a
    parameter less on the device, which cross to it and back in every step. optimizer,parameters: also the float32
    master weights, another 4 bytes, of which the device has a copy in the compute dtype during a step. In any order."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the gradient reduction over data parallel ranks, and over pipeline stages that share a parameter;
    bfloat16 halves the bytes sent. Gradients of microbatches are accumulated in float32 either way."""
    overlap: bool = True
    """Set XLA's options to overlap communication with computation (GPUs only)."""
    coordinator: str | None = None
    """host:port of process 0, for multi-process runs that were not started by torchrun, Slurm, MPI or Kubernetes."""
    num_processes: int | None = at_least(1, None, most=WIDTH)
    """Number of processes; requires --coordinator."""
    process_id: int | None = at_least(0, None, most=WIDTH)
    """Rank of this process, from 0; requires --coordinator."""
    peer_timeout: float = seconds(30.0)
    """Seconds within which all processes of a run end after one of them is lost."""
    step_timeout: float | None = seconds(None)
    """Seconds after which a step counts as hanging, and every process writes its Python stacks to the run's folder; ten
    times the median step, and at least 60, when not given."""
