"""Sizes derived from settings, with defaults filled in."""

import math
from collections.abc import Sequence
from typing import TypedDict

from mtjax.config.field_metadata import TOKENS
from mtjax.config.layer_pattern import SIDE_BY_SIDE
from mtjax.config.model import Model
from mtjax.config.ssm import letters_of
from mtjax.config.training import Training
from mtjax.errors import UserError

MASKED_SHARE = 0.15
"""Fraction of a sample's tokens that BERT masks and predicts."""

GATED = ("swiglu", "swiglu_clamped", "geglu", "geglu_exact")
"""Activations with a gate: the product of two projections."""


def mlp_size(model: Model) -> int:
    """Returns the hidden size of the MLP."""
    return model.mlp_size or 4 * model.hidden_size


def embedding_width(model: Model) -> int:
    """Returns the width of the embedding and output tables."""
    return model.embedding_size or model.hidden_size


def expert_size(model: Model) -> int:
    """Returns the hidden size of an expert."""
    return model.expert_size or mlp_size(model)


def expert_capacity(model: Model, tokens: int) -> int | None:
    """Returns how many of a sample's `tokens` tokens an expert accepts; None without a capacity limit."""
    if model.capacity_factor is None:
        return None
    # At least one token, or experts of short samples would drop all.
    return max(1, math.ceil(model.capacity_factor * tokens * model.experts_top_k / model.num_experts))


def dense_layers(model: Model) -> tuple[int, ...]:
    """Returns the indices of the layers without experts in a model with experts."""
    if "E" in (letters := letters_of(model)):
        return tuple(number for number, letter in enumerate(letters) if letter != "E")
    if model.moe_every > 1:
        return tuple(number for number in range(model.num_layers) if (number + 1) % model.moe_every)
    return tuple(range(model.first_dense_layers))


def main_layers(model: Model) -> tuple[int, ...]:
    """Returns the indices of the layers with experts, or of all layers in a dense model."""
    dense = dense_layers(model)
    return tuple(number for number in range(model.num_layers) if number not in dense)


def dense_settings(dense: Sequence[int], num_layers: int) -> dict[str, int] | None:
    """Returns the settings of a model whose layers with indices `dense` have no experts; None if no settings describe
    it."""
    if list(dense) == list(range(len(dense))):
        return {"first_dense_layers": len(dense)}
    every = num_layers // (num_layers - len(dense))
    is_even = num_layers % every == 0 and [n for n in range(num_layers) if (n + 1) % every] == list(dense)
    return {"moe_every": every} if is_even else None


def head_dim(model: Model) -> int:
    """Returns the width of an attention head; of its query and key with latent attention."""
    if model.kv_lora_rank:
        return model.qk_nope_head_dim + model.qk_rope_head_dim
    return model.head_dim or model.hidden_size // model.num_heads


def value_head_dim(model: Model) -> int:
    """Returns the width of a head's value."""
    return model.v_head_dim if model.kv_lora_rank else head_dim(model)


def latent_width(model: Model) -> int:
    """Returns the width of what latent attention caches of a token: the latent and the rotated key; 0 without it."""
    return model.kv_lora_rank and model.kv_lora_rank + model.qk_rope_head_dim


def num_kv_heads(model: Model) -> int:
    """Returns the number of key and value heads."""
    return model.num_kv_heads or model.num_heads


def attention_biases(model: Model) -> tuple[bool, bool]:
    """Returns whether query, key and value have biases, and whether attention's output projection has one."""
    kind = attention_bias(model)
    return kind in ("qkv", "all"), kind in ("output", "all")


def attention_bias(model: Model) -> str:
    """Returns which linear layers of attention have biases: none, qkv, output or all."""
    return model.attention_bias if model.attention_bias != "auto" else "all" if model.bias else "none"


def mlp_bias(model: Model) -> bool:
    """Returns whether the linear layers of the MLP have biases."""
    return model.bias if model.mlp_bias is None else model.mlp_bias


def norm_vectors(model: Model) -> tuple[str, ...]:
    """Returns the names of a norm's parameters, each of hidden_size numbers."""
    has_bias = model.norm == "layernorm" and model.norm_bias
    return () if model.norm_weight == "none" else ("scale", "bias") if has_bias else ("scale",)


def layer_parallel(model: Model, kind: str) -> str:
    """Returns parallel_residual of the layers of a kind, or of a stack with its name."""
    return "one_norm" if kind == SIDE_BY_SIDE else model.parallel_residual


def joins_outputs(model: Model) -> bool:
    """Returns whether the outputs of a parallel layer's attention and MLP are one sum, which tensor parallel ranks
    reduce once: nothing, such as an adapter, is between their products and the sum."""
    # Each output has a factor of its own before the sum.
    scales = (model.attention_output_scale, model.mlp_output_scale)
    return model.parallel_residual != "no" and not model.lora_rank and scales == (1.0, 1.0)


def sublayer_norms(model: Model, *, is_first: bool, kind: str = "") -> tuple[str, ...]:
    """Returns the kinds of norms of the first sublayer of a kind of layers, or of another: norm, output_norm or
    both."""
    if layer_parallel(model, kind) == "one_norm" and not is_first:
        return ()
    return {"output": ("output_norm",), "sandwich": ("norm", "output_norm")}.get(model.norm_placement, ("norm",))


def norms_outputs(model: Model) -> bool:
    """Returns whether a norm follows each sublayer (output, sandwich), or each residual add (post)."""
    return model.norm_placement != "pre"


class OutputShape(TypedDict):
    """Settings of a model's logits."""

    scale: float
    softcap: float | None


def output_shape(model: Model) -> OutputShape:
    """Returns the factor and the soft cap of a model's logits, by the names in `mtjax.sharding.vocab.OutputOptions`."""
    return {"scale": model.output_scale, "softcap": model.output_softcap}


def layers_with_prediction(model: Model) -> range:
    """Returns the numbers of all layers: those of multi-token prediction follow the others."""
    return range(model.num_layers + model.mtp_num_layers)


def windowed_layers(model: Model) -> tuple[bool, ...]:
    """Returns of each layer, multi-token prediction's included, whether its attention has the sliding window."""
    pattern = model.window_layers if model.attention_window else "F"
    return tuple(pattern[number % len(pattern)] == "S" for number in layers_with_prediction(model))


def attention_windows(model: Model) -> tuple[int, ...] | None:
    """Returns of each layer how many tokens a token attends to at most; None where all layers have full attention."""
    windowed = windowed_layers(model)
    # A layer with full attention among others has a window longer than any sequence.
    return tuple(model.attention_window or TOKENS if on else TOKENS for on in windowed) if any(windowed) else None


def rotated_layers(model: Model) -> tuple[bool, ...]:
    """Returns of each layer, multi-token prediction's included, whether it has RoPE."""
    pattern = model.rope_layers if model.position == "rope" else "N"
    return tuple(pattern[number % len(pattern)] == "R" for number in layers_with_prediction(model))


def longest_text(model: Model) -> int:
    """Returns the maximum number of tokens of a sequence in generation; for a T5, the larger maximum of encoder and
    decoder."""
    if model.family == "t5":
        return max(model.sequence_length, decoder_length(model))
    if model.position == "rope" and model.rope_scaling in ("dynamic", "longrope"):
        # Longer sequences rotate all their keys by other angles, and a cache holds keys that are rotated already.
        return min(model.sequence_length, model.rope_original_length)
    return model.sequence_length


def rotated_dim(model: Model) -> int:
    """Returns the number of dimensions of a head that RoPE rotates: from its first on, or the last with latent
    attention."""
    return model.qk_rope_head_dim if model.kv_lora_rank else int(head_dim(model) * model.rope_fraction)


def decoder_layers(model: Model) -> int:
    """Returns the number of layers of an encoder-decoder's decoder."""
    return model.num_decoder_layers or model.num_layers


def decoder_length(model: Model) -> int:
    """Returns the length of an encoder-decoder's decoder sequence in tokens."""
    return model.decoder_sequence_length or model.sequence_length


def most_masked(sequence_length: int) -> int:
    """Returns the maximum number of masked tokens in a sample of this length."""
    return max(1, round(sequence_length * MASKED_SHARE))


def num_outputs(model: Model) -> int:
    """Returns the number of outputs of a task head: per text, or per token for spans."""
    return {"classification": model.num_labels, "spans": 2}.get(model.head, 1)


def rows_of_question(model: Model) -> int:
    """Returns how many consecutive rows of a batch form one question, and must stay on one data parallel rank."""
    return model.num_labels if model.head == "choices" else 1


def named(model: Model) -> str:
    """Returns the family, and its head unless that is the language model's."""
    return model.family if model.head == "language" else f"{model.family} with a head for {model.head}"


def output_is_tied(model: Model) -> bool:
    """Returns whether the output projection shares the embedding table."""
    return model.tie_embeddings and model.head == "language"


def padded_vocab_size(model: Model) -> int:
    """Returns the vocabulary size, padded to a multiple of `vocab_multiple` (section 5.1)."""
    if model.vocab_size is None:
        raise UserError("vocab_size is not set: add --vocab-size, or a tokenizer that sets it")
    return -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple


def describe_recompute(training: Training) -> str:
    """Describes the recompute settings."""
    if training.recompute != "full":
        return f"{'no' if training.recompute == 'none' else 'selective'} recompute"
    number, offload = training.recompute_num_layers, ", inputs in host memory" if training.recompute_offload else ""
    if training.recompute_method == "block":
        return f"full recompute of the first {number} layers{offload}"
    return "full recompute" + (f" in groups of {number} layers" if number > 1 else "") + offload


def divisors(n: int) -> list[int]:
    """Returns all divisors, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_multiples(size: int, of: int) -> str:
    """Returns the multiples of `of` just below and above `size`, as text; 0 is none."""
    below, above = size // of * of, -(-size // of) * of
    return " and ".join(str(n) for n in (below, above) if n > 0)


def nearest_divisors(total: int, wanted: int) -> str:
    """Returns the divisors of `total` next to `wanted`, as text: "8 and 12"."""
    found = divisors(total)
    below = max((d for d in found if d < wanted), default=None)
    above = min((d for d in found if d > wanted), default=None)
    return " and ".join(str(d) for d in (below, above) if d is not None)
