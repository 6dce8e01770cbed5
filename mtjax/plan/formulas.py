"""Parameters, FLOPs and time of a decoder, by formula: pure functions of a `Shape`, with symbols, units and sources.

Symbols: l layers, h hidden size, a heads, q and k widths of all query and of all key heads together (h in GPT-2), f MLP
width (4h), g projections into the MLP (1, gated 2), n vectors of a norm (layer norm 2, RMS norm 1), V padded vocabulary
rows, s sequence length, B global batch, b microbatch, t model ways, p stages, d data ways, m microbatches. A product
[m,k] x [k,n] costs 2mkn.
Memory is in `mtjax.plan.memory`, traffic in `mtjax.plan.traffic`, pipelines in `mtjax.plan.schedules`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from mtjax import config
from mtjax.plan.families import NORM_VECTORS, Beside

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
    num_kv_heads: int | None = None
    """Key and value heads; as many as heads when None."""
    head_dim: int | None = None
    """Width of a head; h / a when None."""
    gated: bool = False
    """The MLP multiplies two projections."""
    biases: bool = True
    """Of the linear layers."""
    norm_vectors: int = 2
    """n: layer norm has a scale and a bias, RMS norm a scale."""
    learned_positions: bool = True
    """There is a table of positions."""
    post_norm: bool = False
    """A norm follows each residual add, and needs its input again in the backward pass."""
    beside: Beside = field(default_factory=Beside)
    """What there is beside a decoder's parts."""

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
            tied_embeddings=model.tie_embeddings,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            gated=model.activation in config.GATED,
            biases=model.bias,
            norm_vectors=NORM_VECTORS[model.norm],
            learned_positions=model.position == "learned",
            post_norm=model.norm_placement == "post",
            beside=Beside.of(model),
        )

    @classmethod
    def gpt(
        cls, layers: int, hidden: int, heads: int, sequence: int, vocab: int, tied_embeddings: bool = True
    ) -> "Shape":
        """A shape with the usual MLP of 4h; `vocab` is the padded size."""
        return cls(layers, hidden, heads, sequence, vocab, 4 * hidden, tied_embeddings)

    @property
    def query_size(self) -> int:
        """q: width of all query heads together."""
        return self.num_heads * (self.head_dim or self.hidden_size // self.num_heads)

    @property
    def kv_size(self) -> int:
        """k: width of all key heads together, and of all value heads."""
        return self.query_size // self.num_heads * (self.num_kv_heads or self.num_heads)

    def kv_heads_fit(self, model_ways: int) -> bool:
        """Whether each model rank has whole key and value heads, or shares one with some other ranks."""
        heads = self.num_kv_heads or self.num_heads
        return heads % model_ways == 0 or model_ways % heads == 0

    def computed_over(self, model_ways: int) -> "Shape":
        """The shape that the model ways compute with: key and value heads that are fewer, once for every way."""
        heads = self.num_kv_heads or self.num_heads
        return self if heads >= model_ways else replace(self, num_kv_heads=model_ways)

    @property
    def mlp_inputs(self) -> int:
        """g: projections into the MLP."""
        return 2 if self.gated else 1


# Parameters


def layer_parameters(shape: Shape) -> int:
    """Parameters of one layer: `12h^2 + 13h` for GPT-2 (arXiv 2104.04473, appendix).

    Attention `2h(q+k)` and biases `q+2k+h`, MLP `(1+g)hf` and biases `gf+h`, two norms `2nh`.
    """
    split, whole = _layer_parts(shape, 1)
    return split + whole


def layer_parameters_per_rank(shape: Shape, model_ways: int) -> float:
    """Parameters of one layer that one rank of a tensor-parallel group holds (section 3 of arXiv 1909.08053)."""
    split, whole = _layer_parts(shape, model_ways)
    return split / model_ways + whole


def _layer_parts(shape: Shape, model_ways: int) -> tuple[int, int]:
    """Parameters of a layer that are split over the model ways, and those that every rank holds.

    Every rank holds norms and row-parallel biases; also keys and values when their heads don't divide over the ways.
    """
    h, q, k, f, g = shape.hidden_size, shape.query_size, shape.kv_size, shape.mlp_size, shape.mlp_inputs
    bias = int(shape.biases)
    key_value = 2 * k * (h + bias)
    split = q * (h + bias) + q * h + g * f * (h + bias) + f * h
    whole = 2 * bias * h + 2 * shape.norm_vectors * h
    is_split = (shape.num_kv_heads or shape.num_heads) % model_ways == 0
    return (split + key_value, whole) if is_split else (split, whole + key_value)


def whole_outside_layers(shape: Shape) -> int:
    """Parameters outside the layers that every rank holds: positions `sh` if learned, final norm `nh`, heads."""
    positions = shape.sequence_length * shape.learned_positions
    return (positions + shape.norm_vectors) * shape.hidden_size + shape.beside.whole


def embedding_parameters(shape: Shape) -> int:
    """Parameters outside the layers: token table `Vh` (two when untied), learned positions `sh`, final norm `nh`."""
    tables = 1 if shape.tied_embeddings else 2
    return tables * shape.padded_vocab_size * shape.hidden_size + shape.beside.split + whole_outside_layers(shape)


def parameters(shape: Shape) -> int:
    """All parameters: `12lh^2 (1 + 13/(12h) + (V+s)/(12lh)) + 2h` with f = 4h and tied embeddings.

    Source: arXiv 2104.04473, equation 2, plus the final norm.
    """
    return shape.num_layers * layer_parameters(shape) + embedding_parameters(shape)


def megatron_parameters(shape: Shape) -> int:
    """Parameters as Megatron-LM's `theoretical_memory_usage` counts them: no linear biases, no position table."""
    h, q, k, f, n = shape.hidden_size, shape.query_size, shape.kv_size, shape.mlp_size, shape.norm_vectors
    tables = 1 if shape.tied_embeddings else 2
    layer = 2 * h * (q + k) + (1 + shape.mlp_inputs) * h * f + 2 * n * h
    return shape.num_layers * layer + n * h + tables * shape.padded_vocab_size * h


def parameters_per_rank(shape: Shape, model_ways: int) -> int:
    """Parameters that one rank of a tensor-parallel group holds, without stages.

    Matrices, the QKV and MLP-up biases and the token tables are split; norms, the row-parallel biases and the
    positions are held by every rank (section 3 of arXiv 1909.08053).
    """
    split, whole = _layer_parts(shape, model_ways)
    tables = (1 if shape.tied_embeddings else 2) * shape.padded_vocab_size * shape.hidden_size
    layer = split // model_ways + whole
    return shape.num_layers * layer + (tables + shape.beside.split) // model_ways + whole_outside_layers(shape)


# FLOPs


def attention_core_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """Forward FLOPs of scores and context of one layer, per token: `4sq`, or `2sq` for the causal half alone."""
    return 4 * shape.sequence_length * shape.query_size * (0.5 if causal else 1)


def layer_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """Forward FLOPs of one layer per token: `4h(q+k) + 2(1+g)hf + 4sq`; in GPT-2 `24h^2 + 4sh` (arXiv 2104.04473)."""
    h, f = shape.hidden_size, shape.mlp_size
    products = 4 * h * (shape.query_size + shape.kv_size) + 2 * (1 + shape.mlp_inputs) * h * f
    return products + attention_core_flops_per_token(shape, causal=causal)


def logit_flops_per_token(shape: Shape) -> float:
    """Forward FLOPs of the output projection per token: `2hV`, by the share of tokens that have logits."""
    return 2 * shape.hidden_size * shape.padded_vocab_size * shape.beside.logits_per_token


def forward_flops_per_token(shape: Shape, *, causal: bool = False) -> float:
    """FLOPs of one token's forward pass: `24lh^2 + 4slh + 2hV` with f = 4h; and what the family has beside."""
    layers = shape.num_layers * layer_flops_per_token(shape, causal=causal)
    return layers + logit_flops_per_token(shape) + shape.beside.flops_per_token


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
    beside = shape.beside.layer_flops_per_token if recompute == "full" else 0
    return model_flops_per_token(shape, causal=causal) + shape.num_layers * again[recompute] + beside


def compiled_flops_per_token(
    shape: Shape,
    recompute: Recompute = "full",
    *,
    causal: bool = False,
    recompute_logits: bool = True,
    layers_again: int | None = None,
    layers_nested: int = 0,
) -> float:
    """FLOPs per trained token that XLA keeps in a pre-LN decoder's program.

    Like `hardware_flops_per_token`, but with full recompute the MLP's down-projection is not computed again, for nobody
    needs its result: `88lh^2 + 16slh + 8hV` with f = 4h; `6hV` when logits are kept instead of computed again. In a
    post-LN layer the norm after it does need it.

    `layers_again` layers are computed again with full recompute, all of them when None; where several share a group,
    `layers_nested` in all, the down-projection is computed again too.
    """
    logits = logit_flops_per_token(shape) if recompute_logits else 0
    if recompute != "full":
        # Selective: the scores alone; attention's output is kept.
        core = attention_core_flops_per_token(shape, causal=causal) if recompute == "selective" else 0
        return model_flops_per_token(shape, causal=causal) + shape.num_layers * core / 2 + logits
    again = shape.num_layers if layers_again is None else layers_again
    needed = again if shape.post_norm else layers_nested
    dropped = 2 * shape.hidden_size * shape.mlp_size * (again - needed)
    layers = again * layer_flops_per_token(shape, causal=causal) + shape.beside.layer_flops_per_token - dropped
    return model_flops_per_token(shape, causal=causal) + layers + logits


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


def amdahl_speedup(serial_share: float, processors: float) -> float:
    """Largest speed-up of n processors when a share x of the work stays serial: `1 / (x + (1-x)/n)`."""
    return 1 / (serial_share + (1 - serial_share) / processors)


def cost(gpus: int, days: float, price_per_gpu_hour: float) -> float:
    """Price of holding `gpus` for `days`, in the currency of the hourly price."""
    return gpus * days * 24 * price_per_gpu_hour


def steps_for_tokens(tokens: float, global_batch_size: int, sequence_length: int) -> int:
    """Optimizer steps that read `tokens`, rounded up."""
    return math.ceil(tokens / (global_batch_size * sequence_length))
