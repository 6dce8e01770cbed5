"""transformers' `openai-gpt`, the first GPT, whose norms follow the sublayers, and `gpt_neo`."""

from collections.abc import Sequence
from dataclasses import replace

from mtjax.config import Model
from mtjax.convert.model_types.decoder import decoder, layer_norm, size_fields
from mtjax.convert.model_types.decoder_rows import ModuleNames, outside_rows
from mtjax.convert.model_types.family import GPT2_ALIASES, Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    activation,
    always,
    attention_settings,
    shortest,
    window_letters,
)
from mtjax.errors import UserError
from mtjax.families.gpt.hugging_face.gpt2 import LAYER

FUNCTIONS = {"gelu": "gelu", "relu": "relu"}
"""openai-gpt's names of activations -> mtjax's: its gelu is the tanh approximation."""


def _read_function(values: Json) -> Settings:
    if values["afn"] not in FUNCTIONS:
        raise UserError(f"afn is {values['afn']!r}, but must be {' or '.join(map(repr, FUNCTIONS))}")
    return {"activation": FUNCTIONS[values["afn"]]}


def _write_function(model: Model) -> Json:
    return {"afn": next((theirs for theirs, ours in FUNCTIONS.items() if ours == model.activation), "gelu")}


OPENAI_GPT = decoder(
    "openai-gpt",
    "OpenAIGPT",
    {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 512, "vocab_size": 40_478, "afn": "gelu"}
    | {"layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "initializer_range": 0.02}
    | {"tie_word_embeddings": True},
    layer_norm("layer_norm_epsilon"),
    size_fields(
        num_layers="n_layer",
        hidden_size="n_embd",
        num_heads="n_head",
        num_kv_heads="",
        mlp_size="",
        sequence_length="n_positions",
        attention_dropout="attn_pdrop",
        hidden_dropout="resid_pdrop",
    ),
    always(position="learned", norm_placement="post", **attention_settings("all", mlp=True)),
    ConfigKeys(("afn",), _read_function, _write_function),
    # mtjax has one rate for embeddings and sublayers, transformers a key for each.
    ConfigKeys((), lambda values: {}, lambda model: {"embd_pdrop": model.hidden_dropout}),
    names=ModuleNames(prefix="transformer.", embedding="tokens_embed", positions="positions_embed"),
    # GPT-2's names and layout of linear layers.
    rows=lambda names, model: (*outside_rows(names), *LAYER),
    architecture="LMHeadModel",
    aliases=GPT2_ALIASES,
)

LETTERS = {"global": "F", "local": "S"}
"""gpt_neo's kinds of layers -> the letters of window_layers."""


def _kinds(values: Json) -> Sequence[str]:
    """Returns the kind of each layer, which config.json has in groups that repeat, or in a list, which wins."""
    groups, layers, key = values["attention_types"], values["num_layers"], "attention_layers"
    kinds = values.get(key)
    if not kinds:
        kinds, key = [kind for group, times in groups for _ in range(times) for kind in group], "attention_types"
    if len(kinds) != layers:
        raise UserError(f"{key} has {len(kinds)} layers, but num_layers is {layers}")
    if other := sorted(set(kinds) - set(LETTERS)):
        raise UserError(f"{key} has {', '.join(other)}, but must have {' or '.join(LETTERS)}")
    return kinds


def _read_windows(values: Json) -> Settings:
    letters = [LETTERS[kind] for kind in _kinds(values)]
    if "S" not in letters:
        return {"attention_window": None}
    return {"attention_window": values["window_size"], "window_layers": shortest(letters)}


def _write_windows(model: Model) -> Json:
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    layers = [kinds[letter] for letter in window_letters(model)]
    # The list of all layers once, since the pattern need not repeat.
    return {"window_size": model.attention_window or 256, "attention_types": [[layers, 1]]}


GPT2_NAMES = ModuleNames(
    prefix="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{layer}",
    attention="attn",
    attention_norm="ln_1",
    attention_output="c_proj",
    mlp_norm="ln_2",
    up="c_fc",
    down="c_proj",
)
"""Those of GPT-2, which types after it kept."""

GPT_NEO = decoder(
    "gpt_neo",
    "GPTNeo",
    {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "intermediate_size": None, "vocab_size": 50_257}
    | {"max_position_embeddings": 2048, "attention_types": [[["global", "local"], 12]], "window_size": 256}
    | {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_dropout": 0.0, "attention_dropout": 0.0}
    | {"initializer_range": 0.02, "tie_word_embeddings": True},
    layer_norm("layer_norm_epsilon"),
    size_fields(num_layers="num_layers", num_heads="num_heads", num_kv_heads="", hidden_dropout="resid_dropout"),
    activation("activation_function", gate=False, usual="gelu_new"),
    # GPT-Neo does not divide its scores, and has no biases of query, key and value.
    always(position="learned", attention_scale=1.0, **attention_settings("output", mlp=True)),
    ConfigKeys(
        ("attention_types", "window_size", "attention_layers"),
        _read_windows,
        _write_windows,
        {"attention_window": "window_size", "window_layers": ("attention_layers", "attention_types")},
    ),
    ConfigKeys((), lambda values: {}, lambda model: {"embed_dropout": model.hidden_dropout}),
    names=replace(GPT2_NAMES, attention="attn.attention", attention_output="out_proj"),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
)
