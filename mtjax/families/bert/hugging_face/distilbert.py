"""transformers' `distilbert`: a post-LN BERT without token types, with ReLU in the pooler of a text's head."""

from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import mlp_size
from mtjax.convert.model_types.family import (
    ACTIVATIONS,
    ENDINGS,
    Field,
    Json,
    ModelType,
    activation_name,
    head_json,
    head_settings,
)
from mtjax.convert.model_types.rows import attention, linear, norm, row
from mtjax.convert.table import Table
from mtjax.families.bert.hugging_face.bert import HEADS, LAYERS, pad_id

EMBEDDINGS, BLOCK = "distilbert.embeddings", "distilbert.transformer.layer.{layer}"

TABLE = Table(
    format="Hugging Face's distilbert",
    prefix="distilbert.",
    rows=(
        row("embedding", f"{EMBEDDINGS}.word_embeddings.weight", "vocab embed"),
        row("positions", f"{EMBEDDINGS}.position_embeddings.weight", "positions embed"),
        *norm("embedding_norm", f"{EMBEDDINGS}.LayerNorm"),
        *attention(f"{LAYERS}.attention", *(f"{BLOCK}.attention.{x}_lin" for x in "qkv")),
        *linear(f"{LAYERS}.attention.output", f"{BLOCK}.attention.out_lin", "heads*head_dim", "embed"),
        *norm(f"{LAYERS}.attention_norm", f"{BLOCK}.sa_layer_norm"),
        *linear(f"{LAYERS}.mlp.up", f"{BLOCK}.ffn.lin1", "embed", "mlp"),
        *linear(f"{LAYERS}.mlp.down", f"{BLOCK}.ffn.lin2", "mlp", "embed"),
        *norm(f"{LAYERS}.mlp_norm", f"{BLOCK}.output_layer_norm"),
        *linear("head.dense", "vocab_transform", "embed", "features"),
        *norm("head.norm", "vocab_layer_norm"),
        row("head.bias", "vocab_projector.bias", "vocab"),
        row("output", "vocab_projector.weight", "vocab embed"),
        *linear("head.pooler", "pre_classifier", "embed", "features"),
        *linear("head.classifier", "classifier", "embed", "classes"),
        *linear("head.spans", "qa_outputs", "embed", "classes"),
    ),
    ignored=(r"distilbert\.embeddings\.position_ids",),
    copies={"vocab_projector.weight": f"{EMBEDDINGS}.word_embeddings.weight"},
    optional=HEADS[:1],
)

FIELDS = (
    Field("num_layers", "n_layers", 6),
    Field("hidden_size", "dim", 768),
    Field("num_heads", "n_heads", 12),
    Field("sequence_length", "max_position_embeddings", 512),
    Field("vocab_size", "vocab_size", 30522),
    Field("init_std", "initializer_range", 0.02),
    Field("hidden_dropout", "dropout", 0.1),
    Field("attention_dropout", "attention_dropout", 0.1),
    Field("tie_embeddings", "tie_word_embeddings", True),
)


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    """Returns mtjax's settings from config.json."""
    return {
        "family": "bert",
        "norm_placement": "post",
        "norm_epsilon": 1e-12,  # not in config.json
        "num_token_types": 0,
        "sentence_order": False,
        # Fixed in transformers' code; BERT's pooler has tanh.
        "pooler_activation": "relu",
        "mlp_size": config.get("hidden_dim", 3072),
        "activation": ACTIVATIONS[config.get("activation", "gelu")],
        **head_settings(config, ENDINGS),
    }


def _write(model: Model) -> dict[str, Any]:
    """Returns the keys of config.json."""
    return {
        **head_json(model, "DistilBert", "DistilBertForMaskedLM", ENDINGS),
        "hidden_dim": mlp_size(model),
        "activation": activation_name(model),
    }


DISTILBERT = ModelType(
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    table=TABLE,
    fields=FIELDS,
    read=_read,
    write=_write,
    # sinusoidal_pos_embds only says how the positions were initialized.
    only={"activation": tuple(ACTIVATIONS)},
    more_keys=("hidden_dim",),
    ids=pad_id,
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)
