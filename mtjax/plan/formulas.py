"""Parameters, FLOPs and time of a GPT, by formula: pure functions of a `Shape`, with symbols, units and sources.

Symbols: l layers, h hidden size, a heads, f MLP width (4h), V padded vocabulary, s sequence length, B global batch,
b microbatch, t model ways, p stages, d data ways, m microbatches, P parameters. A product [m,k] x [k,n] costs 2mkn.
Memory is in `mtjax.plan.memory`, traffic in `mtjax.plan.traffic`, pipelines in `mtjax.plan.schedules`.
"""

import math
from dataclasses import dataclass
from typing import Literal

from mtjax import config

Recompute = Literal["none", "selective", "full"]
"""What the backward pass computes again: nothing, the attention core, or whole layers."""

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder-only transformer that formulas ask for."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    padded_vocab_size: int
    mlp_size: int
    tied_embeddings: bool = True
    """The output projection is the embedding table (GPT-2)."""

    @classmethod
    def of(cls, model: config.Model) -> "Shape":
        """The shape of a config's model."""
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_heads,
            sequence_length=model.sequence_length,
            padded_vocab_size=config.padded_vocab_size(model),
            mlp_size=config.mlp_size(model),
        )

    @classmethod
    def gpt(
        cls, layers: int, hidden: int, heads: int, sequence: int, vocab: int, tied_embeddings: bool = True
    ) -> "Shape":
        """A shape with the usual MLP of 4h; `vocab` is the padded size."""
        return cls(layers, hidden, heads, sequence, vocab, 4 * hidden, tied_embeddings)


# Parameters


def layer_parameters(shape: Shape) -> int:
    """Parameters of one layer: `12h^2 + 13h` with f = 4h (arXiv 2104.04473, appendix).

    Attention `4h^2 + 4h`, MLP `2hf + f + h`, two norms `4h`.
    """
    h, f = shape.hidden_size, shape.mlp_size
    return (4 * h * h + 4 * h) + (2 * h * f + f + h) + 4 * h


def embedding_parameters(shape: Shape) -> int:
    """Parameters outside the layers: token table `Vh` (twice when untied), positions `sh`, final norm `2h`."""
    tables = 1 if shape.tied_embeddings else 2
    return (tables * shape.padded_vocab_size + shape.sequence_length + 2) * shape.hidden_size


def parameters(shape: Shape) -> int:
    """All parameters: `12lh^2 (1 + 13/(12h) + (V+s)/(12lh)) + 2h` with f = 4h and tied embeddings.

    Source: arXiv 2104.04473, equation 2, plus the final norm.
    """
    return shape.num_layers * layer_parameters(shape) + embedding_parameters(shape)


def megatron_parameters(shape: Shape) -> int:
    """Parameters as Megatron-LM's `theoretical_memory_usage` counts them: no linear biases, no position table."""
    h, f = shape.hidden_size, shape.mlp_size
    tables = 1 if shape.tied_embeddings else 2
    return shape.num_layers * (4 * h * h + 2 * h * f + 4 * h) + 2 * h + tables * shape.padded_vocab_size * h


def parameters_per_rank(shape: Shape, model_ways: int) -> int:
    """Parameters that one rank of a tensor-parallel group holds, without stages.

    Matrices, the QKV and MLP-up biases and the token table are split; norms, the row-parallel biases and the
    positions are held by every rank (section 3 of arXiv 1909.08053).
    """
    h, f, t = shape.hidden_size, shape.mlp_size, model_ways
    layer = (4 * h * h + 3 * h + 2 * h * f + f) // t + (h + h + 4 * h)
    tables = 1 if shape.tied_embeddings else 2
    return shape.num_layers * layer + tables * shape.padded_vocab_size * h // t + (shape.sequence_length + 2) * h


# FLOPs


def attention_core_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """Forward FLOPs of scores and context of one layer, per token: `4sh`, or `2sh` for the causal half alone."""
    return 4 * shape.sequence_length * shape.hidden_size * (0.5 if causal else 1)


def layer_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """Forward FLOPs of one layer per token: `24h^2 + 4sh` with f = 4h (arXiv 2104.04473, appendix)."""
    h, f = shape.hidden_size, shape.mlp_size
    return 8 * h * h + 4 * h * f + attention_core_flops_per_token(shape, causal=causal)


def logit_flops_per_token(shape: Shape) -> float:
    """Forward FLOPs of the output projection per token: `2hV`."""
    return 2 * shape.hidden_size * shape.padded_vocab_size


def forward_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """FLOPs of one token's forward pass: `24lh^2 + 4slh + 2hV` with f = 4h."""
    return shape.num_layers * layer_flops_per_token(shape, causal=causal) + logit_flops_per_token(shape)


def model_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """FLOPs that training one token asks for, recompute never counted: the numerator of MFU.

    Forward once, backward twice: `72lh^2 (1 + s/(6h) + V/(12lh))`. With `causal=False` (the convention of the Megatron
    papers) attention is counted in full; `causal=True` halves the `s/(6h)` term.
    """
    return 3 * forward_flops_per_token(shape, causal=causal)


def hardware_flops_per_token(shape: Shape, recompute: Recompute = "full", *, causal: bool = False) -> float:
    """FLOPs per trained token as published, recompute included: the numerator of HFU.

    Full: `96lh^2 (1 + s/(6h) + V/(16lh))` (arXiv 2104.04473, equation 3); selective: the attention core a fourth time
    (arXiv 2205.05198, section 5); none: `model_flops_per_token`.
    """
    again = {
        "none": 0.0,
        "selective": attention_core_flops_per_token(shape, causal=causal),
        "full": layer_flops_per_token(shape, causal=causal),
    }
    return model_flops_per_token(shape, causal=causal) + shape.num_layers * again[recompute]


def compiled_flops_per_token(
    shape: Shape, recompute: Recompute = "full", *, causal: bool = False, recompute_logits: bool = True
) -> float:
    """FLOPs per trained token that XLA keeps in a pre-LN decoder's program.

    Like `hardware_flops_per_token`, but with full recompute the MLP's down-projection is not computed again, for nobody
    needs its result: `88lh^2 + 16slh + 8hV` with f = 4h; `6hV` when logits are kept instead of computed again.
    """
    dropped = 2 * shape.hidden_size * shape.mlp_size * shape.num_layers if recompute == "full" else 0
    logits = logit_flops_per_token(shape) if recompute_logits else 0
    return hardware_flops_per_token(shape, recompute, causal=causal) - dropped + logits


def flops_per_step(flops_per_token: float, global_batch_size: int, sequence_length: int) -> float:
    """FLOPs of one optimizer step over all devices."""
    return flops_per_token * global_batch_size * sequence_length


def utilisation(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """Share of the peak: MFU when `flops` are model FLOPs, HFU when they are hardware FLOPs."""
    return flops / (seconds * gpus * peak_flops)


# Time


def training_days(
    parameters: float,
    tokens: float,
    gpus: float,
    flops_per_second: float,
    flops_per_parameter_token: float = 6,
) -> float:
    """Days by the rule of thumb: 6 FLOPs per parameter and token, 8 with full recompute; sustained FLOP/s per GPU."""
    return flops_per_parameter_token * parameters * tokens / (gpus * flops_per_second) / SECONDS_PER_DAY


def gpus_for_days(
    parameters: float,
    tokens: float,
    days: float,
    flops_per_second: float,
    flops_per_parameter_token: float = 6,
    recompute_share: float = 0.0,
) -> float:
    """GPUs that finish within `days` by the rule of thumb, not rounded; `recompute_share` adds to the FLOPs."""
    flops = flops_per_parameter_token * parameters * tokens * (1 + recompute_share)
    return flops / (days * SECONDS_PER_DAY * flops_per_second)


def amdahl_speedup(serial_share: float, processors: float) -> float:
    """Largest speed-up of n processors when a share x of the work stays serial: `1 / (x + (1-x)/n)`."""
    return 1 / (serial_share + (1 - serial_share) / processors)


def cost(gpus: int, days: float, price_per_gpu_hour: float) -> float:
    """Price of holding `gpus` for `days`, in the currency of the hourly price."""
    return gpus * days * 24 * price_per_gpu_hour


def steps_for_tokens(tokens: float, global_batch_size: int, sequence_length: int) -> int:
    """Optimizer steps that read `tokens`, rounded up."""
    return math.ceil(tokens / (global_batch_size * sequence_length))
