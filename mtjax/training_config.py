"""The run's own settings - steps, batches, precision, recompute - with what follows from them and what can't be.

Part of `mtjax.config`, which is where others import it from.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtjax.errors import UserError
from mtjax.model_config import Model, decoder_layers, nearest_divisors


@dataclass(frozen=True)
class Training:
    """The run."""

    steps: int = 300_000
    """Optimizer steps."""
    global_batch_size: int = 512
    """Samples in a step, over all devices."""
    train_samples: int | None = None
    """Samples of the run, instead of steps; whole batches of them are used."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: begin with a batch of START, and grow it by INCREMENT up to global_batch_size within
    SAMPLES samples."""
    microbatch_size: int | None = None
    """Samples a data rank takes at a time, accumulating gradients over the rest; all at once when not given."""
    compute_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of activations and products; parameters, gradients, reductions and the loss are float32."""
    loss_scale: float | None = None
    """Of float16: a fixed scale of the loss; dynamic when not given."""
    initial_loss_scale: float = 2.0**32
    """Of float16: the dynamic scale of the first step."""
    min_loss_scale: float = 1.0
    """Of float16: the dynamic scale does not shrink below it."""
    loss_scale_window: int = 1000
    """Of float16: steps without overflow after which the dynamic scale doubles."""
    hysteresis: int = 2
    """Of float16: overflows after which the dynamic scale begins to halve."""
    max_bad_steps: int = 5
    """Steps in a row with a loss or gradient that is not finite, which change nothing, after which the run ends."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again: selective only attention's scores, softmax and dropout, full whole layers
    from their inputs."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Of full recompute: uniform keeps the input of every group of recompute_num_layers layers; block computes the
    first recompute_num_layers layers again and the others not."""
    recompute_num_layers: int = 1
    """Layers of a group (uniform), or layers that are computed again (block)."""
    recompute_offload: bool = False
    """Of full recompute: the inputs wait for the backward pass in the host's memory; GPUs only."""
    loss_chunk: int = 1024
    """Tokens whose logits are alive at a time."""
    seed: int = 1234
    """Seed of initialisation, dropout and sample order."""
    init_from: Path | None = None
    """Start from the weights in this folder, a run's or one that `mtjax convert` wrote, instead of random ones."""


def check_recompute(model: Model, training: Training) -> None:
    """Checks that groups of layers come out even and that there are as many layers as are to be computed again.

    Raises:
      UserError: they don't, or what is offloaded is not there.
    """
    number, layers = training.recompute_num_layers, model.num_layers
    if number < 1:
        raise UserError(f"recompute_num_layers is {number}, and must be at least 1")
    if training.recompute_offload and training.recompute != "full":
        raise UserError(f"recompute_offload keeps layer inputs, and recompute is {training.recompute}: take full")
    if training.recompute != "full":
        return
    if training.recompute_method == "block" and number > layers:
        raise UserError(f"recompute_num_layers {number} is above num_layers {layers}, with recompute_method block")
    stacks = {"num_layers": layers} | ({"num_decoder_layers": decoder_layers(model)} if model.family == "t5" else {})
    for name, count in stacks.items():
        if training.recompute_method == "uniform" and count % number:
            raise UserError(
                f"{name} {count} is no multiple of recompute_num_layers {number}, the size of uniform groups; "
                f"the nearest that divide it are {nearest_divisors(count, number)}"
            )


def check_loss_scale(training: Training) -> None:
    """Checks that the settings of float16's loss scale are possible.

    Raises:
      UserError: the first that is not, or a fixed scale of a type that has none.
    """
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        value = getattr(training, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} is {value}, and must be a finite number above 0")
    if training.initial_loss_scale < training.min_loss_scale:
        raise UserError(
            f"initial_loss_scale {training.initial_loss_scale:g} is below min_loss_scale {training.min_loss_scale:g}"
        )
    if training.loss_scale is not None and training.compute_dtype != "float16":
        raise UserError(f"loss_scale is for compute_dtype float16, and this is {training.compute_dtype}: leave it out")


def layers_again(count: int, training: Training) -> int:
    """How many of a stack's `count` layers the backward pass computes again from their input."""
    if training.recompute != "full":
        return 0
    return min(training.recompute_num_layers, count) if training.recompute_method == "block" else count


def layers_nested(count: int, training: Training) -> int:
    """How many of them it computes again in groups of several."""
    grouped = training.recompute_method == "uniform" and training.recompute_num_layers > 1
    return layers_again(count, training) if grouped else 0


def describe_recompute(training: Training) -> str:
    """What the backward pass computes again, in words."""
    if training.recompute != "full":
        return f"{'no' if training.recompute == 'none' else 'selective'} recompute"
    number, offload = training.recompute_num_layers, ", inputs in host memory" if training.recompute_offload else ""
    if training.recompute_method == "block":
        return f"full recompute of the first {number} layers{offload}"
    return "full recompute" + (f" in groups of {number} layers" if number > 1 else "") + offload
