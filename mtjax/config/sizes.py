"""Sizes that follow from settings: what is not given is filled in here."""

import math
from collections.abc import Sequence

from mtjax.config.model import Model
from mtjax.config.training import Training
from mtjax.errors import UserError

MASKED_SHARE = 0.15
"""Share of a sample's tokens that BERT has to guess."""

GATED = ("swiglu", "geglu")
"""Activations that multiply two projections."""


def mlp_size(model: Model) -> int:
    """Inner width of the MLP."""
    return model.mlp_size or 4 * model.hidden_size


def expert_size(model: Model) -> int:
    """Inner width of an expert."""
    return model.expert_size or mlp_size(model)


def expert_capacity(model: Model, tokens: int) -> int | None:
    """Tokens of a sample with so many that an expert takes at most; None where it takes all that come."""
    if model.capacity_factor is None:
        return None
    return max(1, math.ceil(model.capacity_factor * tokens * model.experts_top_k / model.num_experts))


def dense_layers(model: Model) -> tuple[int, ...]:
    """Numbers of the layers without experts, in a model whose others have some."""
    if model.moe_every > 1:
        return tuple(number for number in range(model.num_layers) if (number + 1) % model.moe_every)
    return tuple(range(model.first_dense_layers))


def main_layers(model: Model) -> tuple[int, ...]:
    """Numbers of the other layers: of those with experts, or of all where none has any."""
    dense = dense_layers(model)
    return tuple(number for number in range(model.num_layers) if number not in dense)


def dense_settings(dense: Sequence[int], num_layers: int) -> dict[str, int] | None:
    """The settings of a model whose layers with these numbers have no experts; None where there are none such."""
    if list(dense) == list(range(len(dense))):
        return {"first_dense_layers": len(dense)}
    every = num_layers // (num_layers - len(dense))
    is_even = num_layers % every == 0 and [n for n in range(num_layers) if (n + 1) % every] == list(dense)
    return {"moe_every": every} if is_even else None


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


def num_outputs(model: Model) -> int:
    """Numbers that a head other than that of language gives for a text, or that of spans for a token."""
    return {"classification": model.num_labels, "spans": 2}.get(model.head, 1)


def rows_of_question(model: Model) -> int:
    """Rows of a batch that belong together, and must not be parted."""
    return model.num_labels if model.head == "choices" else 1


def named(model: Model) -> str:
    """Its family, and its head where that is not of language."""
    return model.family if model.head == "language" else f"{model.family} with a head for {model.head}"


def output_is_tied(model: Model) -> bool:
    """Whether the head reads the table of the embeddings."""
    return model.tie_embeddings and model.head == "language"


def padded_vocab_size(model: Model) -> int:
    """Rows of the embedding table: the vocabulary up to the next multiple of `vocab_multiple` (section 5.1)."""
    if model.vocab_size is None:
        raise UserError("vocab_size is not known yet: give --vocab-size, or let the tokenizer set it")
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def describe_recompute(training: Training) -> str:
    """What the backward pass recomputes, in words."""
    if training.recompute != "full":
        return f"{'no' if training.recompute == 'none' else 'selective'} recompute"
    number, offload = training.recompute_num_layers, ", inputs in host memory" if training.recompute_offload else ""
    if training.recompute_method == "block":
        return f"full recompute of the first {number} layers{offload}"
    return "full recompute" + (f" in groups of {number} layers" if number > 1 else "") + offload


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`, as text: "8 and 12"."""
    found = divisors(total)
    below = max((d for d in found if d < wanted), default=None)
    above = min((d for d in found if d > wanted), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)
