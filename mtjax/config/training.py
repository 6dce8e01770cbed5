"""`[training]`: steps, batches, precision and recompute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtjax.config.field_metadata import SAMPLES, TOKENS, above_zero, at_least, numbers


@dataclass(frozen=True)
class Training:
    """The run."""

    steps: int = at_least(1, 300_000)
    """Optimizer steps."""
    global_batch_size: int = at_least(1, 512, most=TOKENS)
    """Samples in a step, over all devices."""
    train_samples: int | None = at_least(1, None, most=SAMPLES)
    """Samples of the run, instead of steps; whole batches of them are used."""
    rampup_batch_size: tuple[int, int, int] | None = numbers(0, None, most=SAMPLES, length=3)
    """START INCREMENT SAMPLES: begin with a batch of START, and grow it by INCREMENT up to global_batch_size within
    SAMPLES samples."""
    microbatch_size: int | None = at_least(1, None)
    """Samples that a data rank takes at a time, accumulating gradients over its batch; all at once when not given."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of activations and matrix products; parameters, gradients, reductions and the loss are float32."""
    loss_scale: float | None = above_zero(None)
    """float16: a fixed scale of the loss; dynamic when not given."""
    initial_loss_scale: float = above_zero(2.0**32)
    """float16: the dynamic scale of the first step."""
    min_loss_scale: float = above_zero(1.0)
    """float16: the dynamic scale does not shrink below this."""
    loss_scale_window: int = at_least(1, 1000)
    """float16: steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = at_least(1, 2)
    """float16: overflows after which the dynamic scale begins to halve."""
    max_nonfinite_steps: int = at_least(1, 5)
    """The run ends after this many steps in a row whose loss or gradient is not finite; such steps change nothing."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: selective, the scores, softmax and dropout of
    attention; full, entire layers from their inputs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Full recompute: uniform keeps the input of each group of recompute_num_layers layers; block recomputes the first
    recompute_num_layers layers and keeps all of the others."""
    recompute_num_layers: int = at_least(1, 1)
    """Full recompute: layers in a group (uniform), or layers that are recomputed (block)."""
    recompute_offload: bool = False
    """Full recompute: keep the inputs of layers in the host's memory until the backward pass (GPUs only)."""
    unroll_layers: bool = False
    """Compile layers one by one instead of as a loop: what a layer keeps for its backward pass is then not copied into
    stacks and out of them. Steps are faster, and compiling takes longer. Needs recompute none, and
    zero below 3."""
    loss_chunk: int = at_least(1, 1024)
    """Tokens whose logits are in memory at a time."""
    deterministic: bool = False
    """Ask XLA for operations on GPUs that give the same bits each time, which are slower; attention is XLA's then."""
    check_replicas: int = at_least(0, 0)
    """Steps between checks for silent corruption: a step is computed twice, and what several devices hold alike is
    compared, bit by bit; a difference ends the run before the next save. 0 never checks."""
    seed: int = at_least(0, 1234, most=2**32 - 1)
    """Seed of initialisation, dropout and the order of samples."""
    init_from: Path | None = None
    """Start from the weights in this folder, a run's or one that `mtjax convert` wrote, instead of random ones.
    mtjax finetune also takes hf:DIR and megatron:DIR."""
