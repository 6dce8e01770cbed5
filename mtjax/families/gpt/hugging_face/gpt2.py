"""transformers' `gpt2`: OpenAI's GPT-2, with linear layers stored as [inputs, outputs]."""

from typing import Any

from mtjax.config import Model
from mtjax.convert.model_types.family import (
    ACTIVATIONS,
    GPT2_ALIASES,
    Field,
    Json,
    ModelType,
    activation_name,
    head_json,
    head_settings,
)
from mtjax.convert.model_types.rows import decoder, norm, row
from mtjax.convert.table import Row

LAYERS, BLOCK = "stack.layers", "transformer.h.{layer}"


def _linear(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, Row]:
    """Maps a linear layer to transformers' Conv1D, [inputs, outputs], and its bias."""
    weight = row(f"{ours}.weight", f"{theirs}.weight", f"{inputs} {outputs}")
    return weight, row(f"{ours}.bias", f"{theirs}.bias", outputs)


LAYER = (
    *norm(f"{LAYERS}.attention_norm", f"{BLOCK}.ln_1"),
    # All queries, all keys, all values, unlike GPT-NeoX's order by heads.
    *_linear(f"{LAYERS}.attention.qkv", f"{BLOCK}.attn.c_attn", "embed", "qkv*heads*head_dim"),
    *_linear(f"{LAYERS}.attention.output", f"{BLOCK}.attn.c_proj", "heads*head_dim", "embed"),
    *norm(f"{LAYERS}.mlp_norm", f"{BLOCK}.ln_2"),
    *_linear(f"{LAYERS}.mlp.up", f"{BLOCK}.mlp.c_fc", "embed", "mlp"),
    *_linear(f"{LAYERS}.mlp.down", f"{BLOCK}.mlp.c_proj", "mlp", "embed"),
)
POSITIONS = row("positions", "transformer.wpe.weight", "positions embed")
# Buffers of causal masks, which old versions of transformers saved with the weights.
MASKS = r"h\.\d+\.attn\.(bias|masked_bias)"
TABLE = decoder("gpt2", "transformer.", "wte.weight", LAYER, "ln_f", POSITIONS, ignored=MASKS)

ARCHITECTURE = "GPT2LMHeadModel"

FIELDS = (
    Field("num_layers", "n_layer", 12),
    Field("hidden_size", "n_embd", 768),
    Field("num_heads", "n_head", 12),
    Field("mlp_size", "n_inner"),
    Field("sequence_length", "n_positions", 1024),
    Field("vocab_size", "vocab_size", 50257),
    Field("norm_epsilon", "layer_norm_epsilon", 1e-5),
    Field("init_std", "initializer_range", 0.02),
    Field("tie_embeddings", "tie_word_embeddings", True),
    # Written as embd_pdrop, too: mtjax has one rate for both.
    Field("hidden_dropout", "resid_pdrop", 0.1),
    Field("attention_dropout", "attn_pdrop", 0.1),
)


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    return {
        "family": "gpt",
        "activation": ACTIVATIONS[config.get("activation_function", "gelu_new")],
        **head_settings(config),
    }


def _write(model: Model) -> dict[str, Any]:
    return {
        "activation_function": activation_name(model),
        "embd_pdrop": model.hidden_dropout,
        **head_json(model, "GPT2", ARCHITECTURE),
    }


GPT2 = ModelType(
    model_type="gpt2",
    architecture=ARCHITECTURE,
    table=TABLE,
    fields=FIELDS,
    read=_read,
    write=_write,
    only={
        "activation_function": tuple(ACTIVATIONS),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "is_causal": (True, None),
    },
    aliases=GPT2_ALIASES,
)
