"""`[training]`: steps, batch sizes, precision and recompute."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtjax.config.field_metadata import SAMPLES, TOKENS, above_zero, at_least, numbers, setting


@dataclass(frozen=True)
class Training:
    """Steps, batch sizes, precision and recompute."""

    steps: int = at_least(1, 300_000)
    """Number of training steps (Megatron's --train-iters)."""
    global_batch_size: int = at_least(1, 512, most=TOKENS)
    """Samples per step, over all devices."""
    train_samples: int | None = at_least(1, None, most=SAMPLES)
    """Number of samples to train on, instead of --steps (Megatron's --train-samples); rounded down to entire
    batches."""
    rampup_batch_size: tuple[int, int, int] | None = numbers(0, None, most=SAMPLES, length=3)
    """START INCREMENT SAMPLES: start with batches of START samples, and grow them by INCREMENT to global_batch_size
    within SAMPLES samples (as in Megatron)."""
    microbatch_size: int | None = at_least(1, None)
    """Samples per microbatch on each data parallel rank (Megatron's --micro-batch-size), with gradient accumulation
    over the rank's batch; the rank's entire batch when not given."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of activations and matrix multiplications. Parameters, gradients, reductions and the loss are float32."""
    fp8: Literal["none", "tensorwise", "delayed", "rowwise"] = setting("none", alone="delayed")
    """Products of layers in 8-bit floats, on GPUs that have them (Hopper and newer): tensorwise scales each tensor by
    its own largest value, delayed by the largest of earlier steps, which is faster and does not depend on the mesh;
    rowwise scales each row of activations and each column of weights, without tensor parallelism. --fp8 alone is
    delayed.
    Parameters, embedding, head, norms and attention keep their types."""
    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """fp8: type of the gradients of products, E5M2 (hybrid), which has more range, or E4M3, which has more digits; all
    other operands are E4M3 (Megatron's --fp8-format)."""
    fp8_scales: Literal["power-of-two", "exact"] = "power-of-two"
    """fp8: scales as powers of two, which are exact in every type and seldom change (Transformer Engine's
    use_power_2_scales, torchao's round_scales_to_power_of_2), or exact ones, with which the largest value becomes the
    largest number of the type."""
    fp8_amax_history: int = at_least(1, 16, most=1024)
    """fp8 delayed: number of earlier steps whose largest value determines a scale (Megatron's
    --fp8-amax-history-len)."""
    fp8_bf16_first_layers: int = at_least(0, 0)
    """fp8: number of first layers whose products remain in the compute type (Megatron's --first-last-layers-bf16 and
    --num-layers-at-start-in-bf16)."""
    fp8_bf16_last_layers: int = at_least(0, 0)
    """fp8: number of last layers whose products remain in the compute type (Megatron's --first-last-layers-bf16 and
    --num-layers-at-end-in-bf16)."""
    loss_scale: float | None = above_zero(None)
    """float16: static loss scale (Megatron's --loss-scale); dynamic when not given."""
    initial_loss_scale: float = above_zero(2.0**32)
    """float16: initial dynamic loss scale."""
    min_loss_scale: float = above_zero(1.0)
    """float16: minimum dynamic loss scale."""
    loss_scale_window: int = at_least(1, 1000)
    """float16: number of steps without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = at_least(1, 2)
    """float16: number of steps with overflow before the dynamic loss scale is halved."""
    max_nonfinite_steps: int = at_least(1, 5)
    """End the run after this many steps in a row with a loss or gradient that is not finite. Such steps are skipped:
    they do not update the model."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass (Megatron's --recompute-granularity): selective recomputes the
    scores, softmax and dropout of attention; full recomputes entire layers from their saved inputs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Full recompute (Megatron's --recompute-method): uniform saves the input of each group of recompute_num_layers
    layers; block recomputes only the first recompute_num_layers layers and saves all activations of the others."""
    recompute_num_layers: int = at_least(1, 1)
    """Full recompute: number of layers in a group (uniform), or of layers to recompute (block)."""
    recompute_offload: bool = False
    """Full recompute: offload the saved layer inputs to host memory until the backward pass (GPUs only)."""
    unroll_layers: bool | None = None
    """Compile each layer separately instead of one loop (scan) over layers, so that saved activations are not copied
    into stacked arrays: steps are faster, and compiling takes a minute or two. When not given: on GPUs, where it is
    possible and no slower (docs/memory.md has the list)."""
    loss_chunk: int = at_least(1, 1024)
    """Number of tokens whose logits are computed at a time."""
    deterministic: bool = False
    """Use deterministic operations on GPUs, which give bitwise the same results each time and are slower; attention is
    XLA's."""
    check_replicas: int = at_least(0, 0)
    """Steps between checks for silent data corruption: a step is computed two more times and all results are compared
    bit by bit, replicated arrays also between devices; a difference ends the run before the next save. 0 turns the
    checks off."""
    seed: int = at_least(0, 1234, most=2**32 - 1)
    """Random seed of initialization, dropout and the order of samples."""
    init_from: Path | None = None
    """Initialize the model from the weights in this folder (of a run, or written by mtjax convert), or in hf:DIR,
    megatron:DIR or peft:DIR (adapters, merged into their base model), instead of randomly; the run starts at step 0."""
