"""transformers' `bert`, the original with post-LN layers, and `megatron-bert`, with the pre-LN layers of the paper."""

from collections.abc import Mapping
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
from mtjax.convert.model_types.rows import attention, linear, norm, row, with_prefix
from mtjax.convert.table import Row, Table, Tensor, dims
from mtjax.data.tokens.tokenizer import Tokenizer

LAYERS = "stack.layers"

POST_NORMS = "attention.output.LayerNorm", "output.LayerNorm"
"""Names of the norms of attention and of the MLP in post-LN layers."""


def encoder_rows(prefix: str, attention_norm: str, mlp_norm: str, skip: int = 0) -> tuple[Row, ...]:
    """Returns the rows of embeddings and layers, except for the embeddings' norm.

    Args:
      prefix: of the encoder's modules.
      attention_norm: name of the norm of attention in a layer.
      mlp_norm: name of the norm of the MLP.
      skip: rows of the table of positions before the first position.
    """
    block, embeddings = f"{prefix}.encoder.layer.{{layer}}", f"{prefix}.embeddings"
    return (
        row("embedding", f"{embeddings}.word_embeddings.weight", "vocab embed"),
        Row("positions", (Tensor(f"{embeddings}.position_embeddings.weight", dims("positions embed"), skip=skip),)),
        row("token_types", f"{embeddings}.token_type_embeddings.weight", "token_types embed"),
        *norm(f"{LAYERS}.attention_norm", f"{block}.{attention_norm}"),
        *attention(f"{LAYERS}.attention", *(f"{block}.attention.self.{x}" for x in ("query", "key", "value"))),
        *linear(f"{LAYERS}.attention.output", f"{block}.attention.output.dense", "heads*head_dim", "embed"),
        *norm(f"{LAYERS}.mlp_norm", f"{block}.{mlp_norm}"),
        *linear(f"{LAYERS}.mlp.up", f"{block}.intermediate.dense", "embed", "mlp"),
        *linear(f"{LAYERS}.mlp.down", f"{block}.output.dense", "mlp", "embed"),
    )


BIASES = tuple(Tensor(f"cls.predictions.{name}", dims("vocab")) for name in ("bias", "decoder.bias"))


def _rows(attention_norm: str, mlp_norm: str) -> tuple[Row, ...]:
    """Returns the rows of both families: all but the embedding norm of the one and the final norm of the other."""
    return (
        *encoder_rows("bert", attention_norm, mlp_norm),
        *linear("head.dense", "cls.predictions.transform.dense", "embed", "features"),
        *norm("head.norm", "cls.predictions.transform.LayerNorm"),
        # If untied, transformers' output layer has a separate bias, read last; the head's bias has no effect.
        Row("head.bias", BIASES[:1], untied=BIASES),
        # The same tensor as `head.pooler` below: a model has one of the two heads.
        *linear("order.pooler", "bert.pooler.dense", "embed", "features"),
        *linear("order.classifier", "cls.seq_relationship", "embed", "classes"),
        row("output", "cls.predictions.decoder.weight", "vocab embed"),
        *linear("head.pooler", "bert.pooler.dense", "embed", "features"),
        *linear("head.classifier", "classifier", "embed", "classes"),
        *linear("head.spans", "qa_outputs", "embed", "classes"),
    )


COPIES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
IGNORED = (r"bert\.embeddings\.position_ids",)
HEADS = ("head", "order.pooler", "order.classifier")
"""Modules of pretraining only, which may be missing."""

POST_LN = Table(
    format="Hugging Face's bert",
    prefix="bert.",
    rows=(
        *norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *_rows(*POST_NORMS),
    ),
    ignored=IGNORED,
    copies=COPIES,
    optional=HEADS,
)
PRE_LN = Table(
    format="Hugging Face's megatron-bert",
    prefix="bert.",
    rows=(*_rows("attention.ln", "ln"), *norm("final_norm", "bert.encoder.ln")),
    ignored=IGNORED,
    copies=COPIES,
    optional=HEADS,
)

FIELDS = (
    Field("num_layers", "num_hidden_layers", 12),
    Field("hidden_size", "hidden_size", 768),
    Field("num_heads", "num_attention_heads", 12),
    Field("sequence_length", "max_position_embeddings", 512),
    Field("vocab_size", "vocab_size", 30522),
    Field("norm_epsilon", "layer_norm_eps", 1e-12),
    Field("init_std", "initializer_range", 0.02),
    Field("hidden_dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Field("tie_embeddings", "tie_word_embeddings", True),
)
ONLY = {
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


MORE_KEYS = ("type_vocab_size", "intermediate_size")


def pad_id(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns pad_token_id only: transformers' BertConfig has no bos_token_id and eos_token_id either."""
    pad = tokenizer.special("[PAD]") if tokenizer else None
    return {} if pad is None else {"pad_token_id": pad}


def _family(
    model_type: str, model_class: str, placement: str, table: Table, only: Mapping[str, tuple[Any, ...]] = ONLY
) -> ModelType:
    """Returns a family of BERTs with norms before ("pre") or after ("post") each sublayer."""

    def read(config: Json, names: frozenset[str]) -> dict[str, Any]:
        return {
            "family": "bert",
            "norm_placement": placement,
            # transformers looks up a type for each token, so there is at least one.
            "num_token_types": max(config.get("type_vocab_size", 2), 1),
            "mlp_size": config.get("intermediate_size", 3072),
            "activation": ACTIVATIONS[config.get("hidden_act", "gelu")],
            # config.json does not say whether a model has the pooler and the second head.
            "sentence_order": any("pooler" in name or "seq_relationship" in name for name in names),
            **head_settings(config, ENDINGS),
        }

    def write(model: Model) -> dict[str, Any]:
        head = "ForPreTraining" if model.sentence_order else "ForMaskedLM"
        return {
            **head_json(model, model_class, f"{model_class}{head}", ENDINGS),
            "type_vocab_size": model.num_token_types,
            "intermediate_size": mlp_size(model),
            "hidden_act": activation_name(model),
            "is_decoder": False,
        }

    return ModelType(model_type, model_class, table, FIELDS, read, write, only, pad_id, more_keys=MORE_KEYS)


BERT = _family("bert", "Bert", "post", POST_LN)
MEGATRON_BERT = _family("megatron-bert", "MegatronBert", "pre", PRE_LN)
# With task ids, ERNIE adds a fourth embedding.
ERNIE = _family("ernie", "Ernie", "post", with_prefix(POST_LN, "ernie."), ONLY | {"use_task_id": (False,)})
