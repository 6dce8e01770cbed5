"""transformers' `roberta` and its copies: a post-LN BERT whose positions start at 2, without sentence order."""

from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import mlp_size
from mtjax.convert.model_types.family import ENDINGS, Field, Json, ModelType, head_json, head_settings
from mtjax.convert.model_types.rows import linear, norm, row, with_prefix
from mtjax.convert.table import Row, Table, Tensor, dims
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.families.bert.hugging_face.bert import FIELDS, HEADS, MORE_KEYS, ONLY, POST_NORMS, encoder_rows

PAD = 1
"""Id of padding. A token's position is this plus its number, from 1 on."""
SKIPPED = PAD + 1
"""Rows of the table of positions before the first token's: unused, and padding's, which no token sees."""

BIASES = tuple(Tensor(f"lm_head.{name}", dims("vocab")) for name in ("bias", "decoder.bias"))

TABLE = Table(
    format="Hugging Face's roberta",
    prefix="roberta.",
    rows=(
        *norm("embedding_norm", "roberta.embeddings.LayerNorm"),
        *encoder_rows("roberta", *POST_NORMS, skip=SKIPPED),
        *linear("head.dense", "lm_head.dense", "embed", "features"),
        *norm("head.norm", "lm_head.layer_norm"),
        # If untied, transformers' output layer has a separate bias, read last; the head's bias has no effect.
        Row("head.bias", BIASES[:1], untied=BIASES),
        row("output", "lm_head.decoder.weight", "vocab embed"),
        *linear("head.spans", "qa_outputs", "embed", "classes"),
    ),
    # A bare model has a pooler, which was not trained.
    ignored=(r"roberta\.embeddings\.position_ids", r"roberta\.pooler\.dense\.(weight|bias)"),
    copies={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    optional=HEADS[:1],
)


def _fit(table: Table, model: Model) -> Table:
    """Returns the table with the rows of a text's head: that of choices has other names."""
    pooler, output = "classifier.dense", "classifier.out_proj"
    if model.head == "choices":
        # transformers' class for choices uses the encoder's pooler, that for classes a head of its own.
        pooler, output = "roberta.pooler.dense", "classifier"
    head = (
        *linear("head.pooler", pooler, "embed", "features"),
        *linear("head.classifier", output, "embed", "classes"),
    )
    return replace(table, rows=(*table.rows, *head))


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    """Returns mtjax's settings from config.json."""
    return {
        "family": "bert",
        "norm_placement": "post",
        "activation": "gelu_exact",
        "sentence_order": False,
        "sequence_length": config.get("max_position_embeddings", 512) - SKIPPED,
        "num_token_types": max(config.get("type_vocab_size", 2), 1),
        "mlp_size": config.get("intermediate_size", 3072),
        **head_settings(config, ENDINGS),
    }


def _ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the ids of special tokens, which are fixed."""
    # Those of fairseq's dictionaries: <s>, <pad>, </s>.
    return {"bos_token_id": 0, "eos_token_id": 2}


def _family(model_type: str, model_class: str, prefix: str = TABLE.prefix) -> ModelType:
    """Returns one of the families, which differ in names of classes and in the prefix of the modules."""

    def write(model: Model) -> dict[str, Any]:
        return {
            **head_json(model, model_class, f"{model_class}ForMaskedLM", ENDINGS),
            "max_position_embeddings": model.sequence_length + SKIPPED,
            "type_vocab_size": model.num_token_types,
            "intermediate_size": mlp_size(model),
            "hidden_act": "gelu",
            "is_decoder": False,
            "pad_token_id": PAD,
        }

    fields = tuple(
        # transformers' defaults for a config.json without vocab_size.
        Field("vocab_size", "vocab_size", 50265 if model_type == "roberta" else 30522)
        if field.ours == "vocab_size"
        else field
        for field in FIELDS
        if field.ours != "sequence_length"
    )
    # The language head computes the exact GELU, whatever the layers do.
    only = ONLY | {"hidden_act": ("gelu",), "pad_token_id": (PAD,)}
    table = with_prefix(TABLE, prefix)
    fit = lambda table, model: with_prefix(_fit(TABLE, model), prefix)  # noqa: E731
    more = (*MORE_KEYS, "max_position_embeddings")
    return ModelType(model_type, model_class, table, fields, _read, write, only, _ids, fit, more_keys=more)


ROBERTA = _family("roberta", "Roberta")
XLM_ROBERTA = _family("xlm-roberta", "XLMRoberta")
CAMEMBERT = _family("camembert", "Camembert")
DATA2VEC_TEXT = _family("data2vec-text", "Data2VecText", "data2vec_text.")
