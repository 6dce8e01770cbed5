"""transformers' `modernbert` (arXiv 2412.13663): an encoder with rotary positions, sliding windows and a gated MLP."""

from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.convert.model_types.decoder import SIZES, decoder, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames, decoder_rows
from mtjax.convert.model_types.family import Json, ModelType
from mtjax.convert.model_types.parts import (
    FULL,
    SLIDING,
    ConfigKeys,
    Settings,
    activation,
    always,
    biases,
    fields,
    shortest,
    sliding,
    unused,
    window_letters,
)
from mtjax.convert.model_types.rope import rope_by_layer
from mtjax.convert.model_types.rows import linear, norm, row
from mtjax.convert.table import Row, Table
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

LOCAL, EVERY = "local_attention", "global_attn_every_n_layers"
ENDING = "ForMaskedLM"


def _read_windows(values: Json) -> Settings:
    """Reads the window, of which half of local_attention is on each side of a token."""
    if values[LOCAL] < 0:
        raise UserError(f"{LOCAL} is {values[LOCAL]!r}, and must be 0 or more")
    # mtjax counts the token itself: local_attention 128 sees 64 tokens to each side and itself, a window of 65.
    window = values[LOCAL] // 2 + 1
    letters = sliding({**values, "sliding_window": window}, lambda values, layer: layer % values[EVERY] != 0)
    return {"attention_window": window, "window_layers": shortest(letters)} if "S" in letters else {}


def _write_windows(model: Model) -> Json:
    letters, kinds = window_letters(model), {"S": SLIDING, "F": FULL}
    found = {"layer_types": [kinds[letter] for letter in letters]}
    found |= {LOCAL: 2 * (model.attention_window - 1)} if model.attention_window else {}
    # transformers 4 knows only every N-th layer, from the first on.
    pattern = shortest(letters)
    return found | ({EVERY: len(pattern)} if pattern == "F" + "S" * (len(pattern) - 1) else {})


def _check_head(values: Json) -> Settings:
    others = [name for name in values.get("architectures") or () if not name.endswith((ENDING, "ModernBertModel"))]
    if others:
        raise UserError(
            f"architectures is {', '.join(others)}, but must be ModernBert{ENDING}: mtjax has no other head"
        )
    return {"family": "bert", "num_token_types": 0, "sentence_order": False}


def _rows(names: ModuleNames, model: Model) -> tuple[Row, ...]:
    """Returns the rows of the layers, of which the first has no norm of attention's input, and of the head."""
    name = f"{LAYERS}.attention_norm"
    rows = [
        # `first=1`: names of tensors begin with layer 1, as the embeddings' norm is that of layer 0.
        replace(of, tensors=tuple(replace(t, first=1) for t in of.tensors)) if of.ours.startswith(name) else of
        for of in decoder_rows(names, model)
    ]
    head = (*linear("head.dense", "head.dense", "embed", "features"), *norm("head.norm", "head.norm"))
    return (*rows, *head, row("head.bias", "decoder.bias", "vocab"))


def _ids(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the ids of the special tokens that config.json names."""
    names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "bos": "[CLS]", "eos": "[SEP]"}
    ids = {f"{key}_token_id": tokenizer.special(name) for key, name in names.items()} if tokenizer else {}
    return {key: value for key, value in ids.items() if value is not None}


def _encoder(family: ModelType) -> ModelType:
    """Returns a family whose head may be missing, in which it is an encoder's."""
    fit = family.fit

    def with_head(table: Table, model: Model) -> Table:
        return replace(fit(table, model), optional=("head",))

    return replace(family, fit=with_head, ids=_ids)


MODERNBERT = _encoder(
    decoder(
        "modernbert",
        "ModernBert",
        sizes(768, 1152, 22, 12, None, 50_368, 8192)
        | {"norm_eps": 1e-5, "norm_bias": False, "hidden_activation": "gelu", "tie_word_embeddings": True}
        | {LOCAL: 128, EVERY: 3, "global_rope_theta": 160_000.0, "classifier_bias": False},
        *(SIZES, activation("hidden_activation", usual="gelu"), biases("attention_bias", "mlp_bias")),
        ConfigKeys((), _check_head, lambda model: {}),
        always(norm="layernorm", norm_placement="pre", embedding_norm=True, first_attention_norm=False),
        always(position="rope", hidden_dropout=0.0),
        fields(norm_epsilon="norm_eps", norm_bias="norm_bias", head_bias="classifier_bias"),
        rope_by_layer("local_rope_theta", 10_000.0, theta="global_rope_theta"),
        ConfigKeys(
            (LOCAL, EVERY, "layer_types"),
            _read_windows,
            _write_windows,
            {"attention_window": LOCAL, "window_layers": "layer_types"},
        ),
        # Keys that only training and other heads read.
        unused("embedding_dropout", "mlp_dropout", "classifier_pooling", "classifier_dropout"),
        names=ModuleNames(
            embedding="embeddings.tok_embeddings",
            embedding_norm="embeddings.norm",
            final_norm="final_norm",
            output="decoder",
            attention="attn",
            qkv="Wqkv",
            attention_output="Wo",
            attention_norm="attn_norm",
            mlp_norm="mlp_norm",
            gate_up="Wi",
            down="Wo",
        ),
        rows=_rows,
        only={
            "hidden_activation": ("gelu",),
            "classifier_activation": ("gelu",),
            "decoder_bias": (True,),
            "rope_scaling": (None,),
        },
        architecture=ENDING,
        classifies=False,
    )
)
