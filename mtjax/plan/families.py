"""What a family of models has beside the parts of a decoder: BERT's heads, T5's second stack.

Symbols as in `mtjax.plan.formulas`; e and d are the tokens of an encoder and of its decoder, L the decoder's layers.
"""

from dataclasses import dataclass

from mtjax import config

NORM_VECTORS = {"layernorm": 2, "rmsnorm": 1}
"""Norm -> n, vectors of h parameters that it has."""


@dataclass(frozen=True)
class Beside:
    """Parameters and FLOPs beside those of a decoder of the same sizes."""

    split: int = 0
    """Parameters that are split over the model ways."""
    whole: int = 0
    """Parameters that every rank holds."""
    flops_per_token: float = 0
    """Forward, for each of the `sequence_length` tokens."""
    layer_flops_per_token: float = 0
    """Those of them that full recompute repeats."""
    logits_per_token: float = 1
    """Tokens whose logits are computed, for each of the `sequence_length` tokens."""

    @classmethod
    def of(cls, model: config.Model) -> "Beside":
        """What the model's family adds."""
        kinds = {"bert": _bert, "t5": _t5}
        return kinds[model.family](model) if model.family in kinds else cls()


def _bert(model: config.Model) -> Beside:
    """Token types `Th`, masked-LM head `h^2 + h + nh + V`, pooler `h^2 + h` and classifier `2h + 2`.

    The masked-LM head works on masked tokens alone, M of s.
    """
    h, order = model.hidden_size, int(model.sentence_order)
    masked = h * h + h + NORM_VECTORS[model.norm] * h
    whole = model.num_token_types * h + masked + order * (h * h + h + 2 * h + 2)
    share = config.most_masked(model.sequence_length) / model.sequence_length
    flops = 2 * h * h * share + order * 2 * h * h / model.sequence_length
    return Beside(config.padded_vocab_size(model), whole, flops, logits_per_token=share)


def _t5(model: config.Model) -> Beside:
    """The decoder: L layers, each with cross-attention `4hq` and a third norm; relative positions of both stacks.

    Logits are of the decoder's tokens alone.
    """
    h, f, n, bias = model.hidden_size, config.mlp_size(model), NORM_VECTORS[model.norm], int(model.bias)
    q, layers = model.num_heads * config.head_dim(model), config.decoder_layers(model)
    e, d = model.sequence_length, config.decoder_length(model)
    inputs = 2 if model.activation in config.GATED else 1
    is_relative = model.position == "relative"
    attention, mlp = 3 * q * (h + bias) + q * h, inputs * f * (h + bias) + f * h
    split = layers * (2 * attention + mlp) + 2 * model.relative_buckets * model.num_heads * is_relative
    whole = layers * (3 * bias * h + 3 * n * h) + n * h + max(d - e, 0) * h * (not is_relative)
    written = 12 * h * q + 2 * (1 + inputs) * h * f + 4 * (d + e) * q
    layer_flops = layers * (d / e * written + 4 * h * q)
    return Beside(split, whole, layer_flops, layer_flops, d / e)
