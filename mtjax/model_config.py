"""The network's settings: one family's defaults beside another's, sizes that follow from them, and what can't be.

Part of `mtjax.config`, which is where others import it from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mtjax.errors import UserError


@dataclass(frozen=True)
class Model:
    """The network: GPT-2 as in section 3 of arXiv 1909.08053, or another family."""

    family: Literal["gpt", "llama", "bert", "t5"] = "gpt"
    """gpt, llama, bert or t5. A family brings its own norm, position, activation, bias, tie_embeddings, norm_epsilon
    and dropout, each of which can be set all the same."""
    num_layers: int = 24
    """Transformer layers."""
    hidden_size: int = 1024
    """Width of the residual stream."""
    num_heads: int = 16
    """Attention heads; each is hidden_size / num_heads wide, or head_dim."""
    num_kv_heads: int | None = None
    """Key and value heads, each shared by a group of query heads (grouped-query attention); num_heads when not
    given."""
    head_dim: int | None = None
    """Width of a head; hidden_size / num_heads when not given."""
    mlp_size: int | None = None
    """Inner width of the MLP; 4 x hidden_size when not given."""
    sequence_length: int = 1024
    """Tokens in a sample, and positions that the model knows."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; the tokenizer's when not given."""
    vocab_multiple: int = 1024
    """The vocabulary is padded up to a multiple of this; never depends on the mesh."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm subtracts the mean and adds a bias; rmsnorm does neither."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre normalises what a sublayer reads and leaves the residual stream clean; post, the original BERT's, normalises
    the stream after each sublayer (Figure 7 of the paper)."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer norm, to the mean square in RMS norm."""
    position: Literal["learned", "rope", "relative"] = "learned"
    """learned adds a vector per position to the embeddings; rope rotates queries and keys (arXiv 2104.09864); relative,
    T5's, adds a number per head and distance to the scores, which are not scaled, and scales a tied output."""
    rope_theta: float = 10_000.0
    """RoPE's base: the longest wavelength is about 2 pi times this many tokens."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """How RoPE reaches beyond the length it was trained on: linear divides every frequency by rope_factor, llama3 only
    those whose wavelength is long beside rope_original_length (Llama 3.1)."""
    rope_factor: float = 8.0
    """By how much rope_scaling slows frequencies down."""
    rope_low_frequency_factor: float = 1.0
    """llama3: wavelengths above rope_original_length / this are scaled in full."""
    rope_high_frequency_factor: float = 4.0
    """llama3: wavelengths below rope_original_length / this are left alone."""
    rope_original_length: int = 8192
    """llama3: the sequence length before scaling."""
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = "gelu"
    """The MLP's: gelu is the tanh approximation; swiglu and geglu multiply two projections, one of them activated."""
    bias: bool = True
    """Biases in attention and the MLP."""
    tie_embeddings: bool = True
    """The output projection is the embedding table."""
    num_decoder_layers: int | None = None
    """t5: layers of the decoder; num_layers, which are the encoder's, when not given."""
    decoder_sequence_length: int | None = None
    """t5: tokens that the decoder writes; sequence_length, which is the encoder's, when not given."""
    relative_buckets: int = 32
    """t5: kinds of distance between two tokens that relative positions tell apart."""
    relative_max_distance: int = 128
    """t5: distances from here on are one kind."""
    num_token_types: int = 2
    """bert: kinds of tokens, each with an embedding - first and second sentence; 0 has none."""
    sentence_order: bool = True
    """bert: also learn whether two sentences are swapped, from the first token."""
    hidden_dropout: float = 0.1
    """Dropout on embeddings and on what enters the residual stream."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities; flash attention needs 0."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    scaled_init: bool = True
    """Divide the deviation of weights just before a residual add by sqrt(2 x num_layers)."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto takes cuDNN's flash attention on GPUs when attention_dropout is 0, else XLA's."""


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "position": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "bert": {
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "position": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "t5": {
        "norm": "rmsnorm",
        "norm_epsilon": 1e-6,
        "position": "relative",
        "activation": "relu",
        "bias": False,
        "tie_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "llama": {
        "norm": "rmsnorm",
        "norm_epsilon": 1e-5,
        "position": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
}
"""Family -> the settings that it brings; `mtjax.config.replace` puts them in force where the family changes."""

MASKED_SHARE = 0.15
"""Share of a sample's tokens that BERT has to guess."""

GATED = ("swiglu", "geglu")
"""Activations that multiply two projections."""


def mlp_size(model: Model) -> int:
    """Inner width of the MLP."""
    return model.mlp_size or 4 * model.hidden_size


def head_dim(model: Model) -> int:
    """Width of an attention head."""
    return model.head_dim or model.hidden_size // model.num_heads


def num_kv_heads(model: Model) -> int:
    """Key and value heads."""
    return model.num_kv_heads or model.num_heads


def decoder_layers(model: Model) -> int:
    """Layers of an encoder-decoder's decoder."""
    return model.num_decoder_layers or model.num_layers


def decoder_length(model: Model) -> int:
    """Tokens that an encoder-decoder's decoder writes."""
    return model.decoder_sequence_length or model.sequence_length


def most_masked(sequence_length: int) -> int:
    """Most tokens of a sample of this length that a masked language model has to guess."""
    return max(1, round(sequence_length * MASKED_SHARE))


def padded_vocab_size(model: Model) -> int:
    """Rows of the embedding table: the vocabulary up to the next multiple of `vocab_multiple` (section 5.1)."""
    if model.vocab_size is None:
        raise UserError("vocab_size is not known yet: give --vocab-size, or let the tokenizer set it")
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def check_model(model: Model) -> None:
    """Checks how the model's settings fit each other; `mtjax.config.validate` has looked at each of them alone.

    Raises:
      UserError: names both settings, and what would fit.
    """
    if model.head_dim is None and model.hidden_size % model.num_heads:
        fits = nearest_divisors(model.hidden_size, model.num_heads)
        raise UserError(
            f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}; "
            f"the nearest num_heads that fit are {fits}"
        )
    if model.num_heads % num_kv_heads(model):
        fits = nearest_divisors(model.num_heads, num_kv_heads(model))
        raise UserError(
            f"num_heads {model.num_heads} do not divide into groups for num_kv_heads {model.num_kv_heads}; "
            f"the nearest num_kv_heads that fit are {fits}"
        )
    if model.family == "bert" and model.position != "learned":
        raise UserError(f"position is {model.position!r}, and the family bert has learned positions")
    if model.family != "bert" and model.norm_placement != "pre":
        raise UserError(f"norm_placement is {model.norm_placement!r}, and the family {model.family} has pre alone")
    if model.position == "relative" and model.family != "t5":
        raise UserError(f"position is 'relative', which is of the family t5, and the family is {model.family}")
    if model.family == "t5" and model.position == "rope":
        raise UserError("position is 'rope', and the family t5 has relative or learned positions")
    if model.family == "t5" and num_kv_heads(model) != model.num_heads:
        raise UserError(f"num_kv_heads is {model.num_kv_heads}, and the family t5 has as many as num_heads")
    if model.relative_buckets < 4 or model.relative_buckets % 4:
        raise UserError(f"relative_buckets is {model.relative_buckets}, and must be a multiple of 4")
    if model.relative_max_distance <= model.relative_buckets:
        distance, buckets = model.relative_max_distance, model.relative_buckets
        raise UserError(f"relative_max_distance {distance} must be above relative_buckets {buckets}")
    if model.num_token_types < 0:
        raise UserError(f"num_token_types is {model.num_token_types}, and must be 0 or more")
    if model.position == "rope":
        _check_rope(model)


def _check_rope(model: Model) -> None:
    if head_dim(model) % 2:
        raise UserError(f"rope rotates pairs, and a head is {head_dim(model)} wide; take an even head_dim")
    for name in ("rope_theta", "rope_factor", "rope_low_frequency_factor", "rope_high_frequency_factor"):
        value = getattr(model, name)
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name} is {value}, and must be a finite number above 0")
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if model.rope_scaling == "llama3" and low >= high:
        raise UserError(f"rope_low_frequency_factor {low} must be below rope_high_frequency_factor {high}")


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`, as text: "8 and 12"."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = max((d for d in divisors if d < wanted), default=None)
    above = min((d for d in divisors if d > wanted), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)
