"""A decoder type of transformers: its defaults, the parts of its config.json, and the names of its tensors."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.field_metadata import LAYERS
from mtjax.convert.model_types.decoder_rows import ModuleNames, decoder_rows
from mtjax.convert.model_types.family import Json, ModelType, head_json, head_settings
from mtjax.convert.model_types.parts import ConfigKeys, activation, all_named, always, biases, fields
from mtjax.convert.model_types.rope import rope
from mtjax.convert.model_types.value_kinds import Kind
from mtjax.convert.table import Row, Table
from mtjax.errors import UserError

Only = Mapping[str, tuple[Any, ...]]

UNSUPPORTED: Only = {
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "use_bidirectional_attention": (False, None),
    "is_causal": (True, None),
}
"""Keys of any type that would change the network."""


def sizes(
    hidden: int, inner: int | None, layers: int, heads: int, kv_heads: int | None, vocabulary: int, positions: int
) -> dict[str, Any]:
    """Returns the defaults of a type's sizes, by Llama's keys, and those of other keys that most types share."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
    }


ROPE_OBJECT = "rope_parameters"
SIZE_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_size": "intermediate_size",
    "sequence_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "init_std": "initializer_range",
    "attention_dropout": "attention_dropout",
    "tie_embeddings": "tie_word_embeddings",
}
"""Settings of sizes -> Llama's keys."""


def size_fields(**keys: str) -> ConfigKeys:
    """Returns the part of sizes; `keys` replaces some of Llama's, "" by none."""
    return fields(**{ours: theirs for ours, theirs in (SIZE_KEYS | keys).items() if theirs})


SIZES = size_fields()
HEAD_DIM = fields(head_dim="head_dim")
RMS_NORM = ConfigKeys(
    ("rms_norm_eps",),
    lambda values: {
        "family": "llama",
        "norm": "rmsnorm",
        "hidden_dropout": 0.0,
        "norm_epsilon": values["rms_norm_eps"],
    },
    lambda model: {"rms_norm_eps": model.norm_epsilon},
    {"norm_epsilon": "rms_norm_eps"},
)
ROPE = rope()
SWIGLU = activation()
NO_BIASES = biases()
ROTARY = always(position="rope")

LIKE_LLAMA = (SIZES, RMS_NORM, SWIGLU, ROTARY)


def layer_norm(key: str = "layer_norm_eps") -> ConfigKeys:
    """Returns the part of a type with layer norm; `key` is its epsilon's."""
    return ConfigKeys(
        (key,),
        lambda values: {"family": "gpt", "norm": "layernorm", "hidden_dropout": 0.0, "norm_epsilon": values[key]},
        lambda model: {key: model.norm_epsilon},
        {"norm_epsilon": key},
    )


def _settings(parts: tuple[ConfigKeys, ...], defaults: Json, config: Json) -> dict[str, Any]:
    """Returns mtjax's settings, for arguments as of `decoder`.

    Raises:
      UserError: a value is not supported.
    """
    values = {**defaults, **config}
    if values.get(ROPE_OBJECT) is None and ROPE_OBJECT in defaults:  # null is as if it were missing
        values[ROPE_OBJECT] = defaults[ROPE_OBJECT]
    for key in ("num_hidden_layers", "n_layer", "n_layers"):
        # Patterns of layers are made from it.
        count = values.get(key, 1)
        if not (isinstance(count, int) and 1 <= count <= LAYERS):
            raise UserError(f"{key} is {count!r}, and must be between 1 and {LAYERS}")
    for key in (
        "hidden_size",
        "n_embd",
        "d_model",
        "num_attention_heads",
        "num_heads",
        "n_head",
        "n_heads",
        "head_dim",
    ):
        # Other sizes and factors are computed from these.
        if isinstance(values.get(key), int) and values[key] < 1:
            raise UserError(f"{key} is {values[key]!r}, and must be at least 1")
    settings: dict[str, Any] = {}
    for part in parts:
        # The later part wins: a type repeats a shared part and then replaces what differs.
        settings |= part.read(values)
    if not settings.get("attention_window"):
        # It is of layers with a window, and mtjax refuses a setting without effect.
        settings.pop("rope_local_theta", None)
    return settings


def _written(parts: Sequence[ConfigKeys], model: Model) -> dict[str, Any]:
    """Returns the keys of config.json that parts write; of two that write the same, the later wins."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part.write(model)
    return found


def _fitted(table: Table, rows: tuple[Row, ...], ignored: tuple[str, ...]) -> Table:
    """Returns a table with the rows of a model, and with further tensors that are not read."""
    return replace(table, rows=rows, ignored=(*table.ignored, *ignored))


def _inside(modules: Iterable[str]) -> tuple[str, ...]:
    """Returns regular expressions of the tensors in modules."""
    return tuple(rf"{re.escape(module)}\..*" for module in modules)


def decoder(
    model_type: str,
    name: str,
    defaults: Json,
    *parts: ConfigKeys,
    names: ModuleNames | None = None,
    rows: Callable[[ModuleNames, Model], tuple[Row, ...]] = decoder_rows,
    ignored: Callable[[Model], tuple[str, ...]] = lambda model: (),
    shared: Callable[[Model], Mapping[str, str]] = lambda model: {},
    only: Only | None = None,
    architecture: str = "ForCausalLM",
    classifies: bool = True,
    packed: str = "fp8",
    aliases: Mapping[str, str] | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> ModelType:
    """Describes a decoder type.

    Args:
      model_type: transformers' name of the type.
      name: prefix of its classes.
      defaults: key of config.json -> transformers' default for a missing one.
      parts: what is read and written; of two that read or write the same, the later wins.
      names: transformers' names of its modules; Llama's when None.
      rows: returns the rows of its table.
      ignored: returns regular expressions of further tensors that are not read.
      shared: as `ModelType.shared`; what files have of these modules is not read.
      only: keys -> the only values that are supported; a missing key is.
      architecture: ending of the class with a language head.
      packed: the quantized weights that are read, as in `ModelType.packed`.
      classifies: whether transformers has a class for sequence classification.
      aliases: other names of keys -> the names in `defaults`, as in `ModelType.aliases`.
      kinds: as `ModelType.kinds`.
    """
    names, language = names or ModuleNames(), f"{name}{architecture}"
    supported = {**UNSUPPORTED, **(only or {})}

    def write(model: Model) -> dict[str, Any]:
        found = _written(parts, model)
        # A head that transformers lacks is not written, which `ModelType.misfits` then rejects.
        return found | (head_json(model, name, language) if classifies else {})

    return ModelType(
        model_type=model_type,
        architecture=language,
        table=names.table(model_type),
        fields=(),
        read=lambda config, tensors: _settings(parts, defaults, config) | head_settings(config),
        write=write,
        only=supported,
        fit=lambda table, model: _fitted(table, rows(names, model), (*ignored(model), *_inside(shared(model)))),
        shared=shared,
        keys=frozenset(key for part in parts for key in part.keys) | frozenset(supported) | frozenset(aliases or ()),
        aliases=aliases or {},
        kinds=kinds or {},
        named=all_named(parts),
        packed=packed,
    )
