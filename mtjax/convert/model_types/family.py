"""Description of a model type of transformers, from which configs are read, written and checked."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mtjax.config import Config, Model, replace
from mtjax.config.model_identity import effective_settings
from mtjax.config.sizes import num_outputs, rotated_layers, windowed_layers
from mtjax.convert import compressed
from mtjax.convert.fp8 import BLOCK
from mtjax.convert.model_types.foreign import foreign
from mtjax.convert.model_types.value_kinds import MISREAD, Kind, culprit, of_another_kind
from mtjax.convert.table import Table
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError, naming, shortened

Json = Mapping[str, Any]

GPT2_ALIASES: Mapping[str, str] = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Names that transformers also reads in the types with GPT-2's keys."""

CHOICES = 4
"""Number of choices of a question, which config.json does not contain: as in RACE and SWAG."""

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    # Like the two above, the tanh approximation; only its rounding differs.
    "gelu_fast": "gelu",
    "relu": "relu",
}
"""transformers' names of activations that are not gated -> mtjax's."""


@dataclass(frozen=True)
class Field:
    """A setting of mtjax and the equivalent key of config.json."""

    ours: str
    theirs: str
    default: Any = None
    """transformers' default for a config.json without the key."""


def end_of_text(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns bos_token_id and eos_token_id of decoders, from the tokenizer."""
    if tokenizer is None:
        return {}
    return {"bos_token_id": begin_of_text(tokenizer), "eos_token_id": tokenizer.eod}


def begin_of_text(tokenizer: Tokenizer) -> int:
    """Returns the token that a tokenizer prepends to a prompt, such as Llama's `<s>`, else the end of document."""
    front = added_tokens(tokenizer).front
    return front[0] if front else tokenizer.eod


@dataclass(frozen=True)
class ModelType:
    """A model type of transformers."""

    model_type: str
    architecture: str
    """The class that `from_pretrained` constructs."""
    table: Table
    fields: tuple[Field, ...]
    """Settings that differ only in their names."""
    read: Callable[[Json, frozenset[str]], dict[str, Any]]
    """Returns mtjax's other settings from a config.json and the names of the tensors."""
    write: Callable[[Model], dict[str, Any]]
    """Returns the other keys of config.json from mtjax's settings."""
    only: Mapping[str, tuple[Any, ...]]
    """Keys of config.json -> the only values that are supported."""
    ids: Callable[[Tokenizer | None], dict[str, Any]] = end_of_text
    """Returns ids of special tokens from the tokenizer, if any, for weights that came without a config.json."""
    fit: Callable[[Table, Model], Table] = lambda table, model: table
    """Returns the table of a model, whose rows may depend on its settings."""
    shared: Callable[[Model], Mapping[str, str]] = lambda model: {}
    """Returns the full names of modules that share their weights with an earlier module -> the name of that one, of
    which alone the table has tensors."""
    keys: frozenset[str] = frozenset()
    """All keys of config.json that `read` uses or `only` lists, of which an export keeps none that it does not write;
    empty for a type that keeps them."""
    more_keys: tuple[str, ...] = ()
    """Keys that `read` uses and `fields` and `only` lack, in a type without `keys`."""
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """Keys whose values are of other kinds than in other types -> these."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys of config.json -> the names that `read`, `fields` and `only` have."""
    named: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Settings that `read` returns -> config.json's key for each; or several, of which it has one."""
    packed: str = "fp8"
    """Quantized weights that are read: fp8, in blocks (`convert/fp8.py`), or mxfp4 (`convert/mxfp4.py`)."""
    unties: bool = True
    """Whether a model whose config.json ties the output is read as untied if the output differs from the embedding; not
    where tied outputs are also scaled."""

    def table_of(self, model: Model) -> Table:
        """Returns the table of a model's tensors."""
        return self.fit(self.table, model)

    def model_settings(self, config: Json, names: frozenset[str], source: str) -> dict[str, Any]:
        """Returns mtjax's settings of a model from its config.json and the names of its tensors.

        Raises:
          UserError: values are not supported (lists all of them).
        """
        known = {*self.keys, *self.more_keys, *self.only, *(each.theirs for each in self.fields), "architectures"}
        # One error lists all that is wrong, so that a user edits the config.json only once.
        wrong = of_another_kind(config, known, self.aliases, self.kinds)
        config, contradictions = self.renamed(config)
        # A value of another kind would be reported again as one that is not supported.
        named = {said.split(" is ")[0] for said in wrong}
        wrong += contradictions
        wrong += [
            f"{key} is {shortened(repr(config[key]))}, but must be {' or '.join(map(repr, values))}"
            for key, values in self.only.items()
            if key in config and config[key] not in values and key not in named
        ]
        wrong += quantized(config, self.packed)
        # Of keys that the type does not know, only those that would change the network are refused: most are notes of
        # the program that saved.
        wrong += foreign(config, known)
        if wrong:
            raise UserError(f"{source} is a {self.model_type} that mtjax does not support: {'; '.join(wrong)}")
        simple = {each.ours: config.get(each.theirs, each.default) for each in self.fields}
        read = lambda config: self.read(config, names)  # noqa: E731
        with naming(source):
            try:
                return simple | read(config)
            # Only `read` itself knows which values it expects, so the key is found by trying.
            except MISREAD as e:
                if (key := culprit(config, read, e)) is None:
                    raise
                why = f"which is missing {e}" if isinstance(e, KeyError) else f"which a {self.model_type} can't have"
                raise UserError(f"{key} is {shortened(repr(config[key]))}, {why}") from None

    @contextmanager
    def naming_keys(self, config: Json) -> Iterator[None]:
        """Adds to the settings that an error names the keys that this config.json has for them.

        Raises:
          UserError: one was raised.
        """
        typed = {key: other for other, key in self.aliases.items() if other in config}
        named = {**{each.ours: each.theirs for each in self.fields}, **self.named}
        read = {ours: _one_in(config, theirs) for ours, theirs in named.items()}
        keys = {**typed, **{ours: typed.get(theirs, theirs) for ours, theirs in read.items()}}
        # Not where the names agree, nor where config.json has a key of mtjax's name that means something else.
        keys = {ours: theirs for ours, theirs in keys.items() if theirs != ours not in config}

        def both(found: re.Match[str]) -> str:
            # Each once.
            key = keys.pop(found[0], None)
            return f"{found[0]} ({key} in config.json)" if key else found[0]

        try:
            yield
        except UserError as e:
            known = [re.escape(ours) for ours, theirs in keys.items() if not _is_named(theirs, str(e))]
            said = re.sub(rf"(?<![\w./-])({'|'.join(known)})(?![\w./-])", both, str(e)) if known else str(e)
            raise UserError(said) from e

    def renamed(self, config: Json) -> tuple[Json, list[str]]:
        """Returns a config.json with the names of keys that `read` has, and which other names contradict theirs."""
        found, wrong = {key: value for key, value in config.items() if key not in self.aliases}, []
        for other, key in self.aliases.items():
            value = config.get(other)
            # null under the other name means false in transformers.
            if value is None and not (other in config and found.get(key) in (True, 1)):
                continue
            if found.setdefault(key, value) != value:
                wrong.append(
                    f"{other} is {value!r}, but {key}, the same setting, is {found[key]!r}: remove one of them"
                )
        return found, wrong

    def config_json(self, model: Model) -> dict[str, Any]:
        """Returns the config.json of an mtjax model."""
        simple = {each.theirs: getattr(model, each.ours) for each in self.fields}
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        return head | simple | self.write(model)

    def misfits(self, model: Model) -> list[str]:
        """Returns the settings of a model that this type can't represent: those that don't survive a round trip."""
        try:
            settings = self.model_settings(self.config_json(model), frozenset(), self.model_type)
        except UserError as e:  # such as an activation that the type lacks
            return [str(e)]
        # A round trip instead of a list of what each type supports, which would have to be kept true.
        back = replace(Config(), **settings).model
        # Only padding; determined by the names of tensors; given by the biases of attention and the MLP.
        ignored = ("vocab_multiple", "sentence_order", "bias")
        converted, ours = _comparable(back), _comparable(model)
        return [
            f"{name} {value}" for name, value in ours.items() if name not in ignored and converted.get(name) != value
        ]


def _one_in(config: Json, keys: str | tuple[str, ...]) -> str:
    """Returns the key that a config.json has of several; the first if it has none."""
    several = (keys,) if isinstance(keys, str) else keys
    return next((key for key in several if key in config), several[0])


def _is_named(key: str, message: str) -> bool:
    """Returns whether a message has a key already; a plain word, such as factor, may mean something else."""
    end = r"\b" if "_" in key else r" in config\.json"
    return re.search(rf"\b{re.escape(key)}{end}", message) is not None


QUANTIZED = ("quantization_config", "compression_config")
"""Keys of config.json that say how weights are quantized."""


def quantized(config: Json, packed: str) -> list[str]:
    """Returns what of a config.json's quantized weights is not read; `packed` is as in `ModelType.packed`."""
    wrong = []
    for key in QUANTIZED:
        found = {} if config.get(key) is None else config[key]
        if not isinstance(found, dict):
            wrong.append(f"{key} is {shortened(repr(found))}, but must be an object")
            continue
        method, block = found.get("quant_method", "not given"), found.get("weight_block_size")
        if method == compressed.METHOD:
            wrong += compressed.unread(found)
        elif found and method != packed:
            wrong.append(
                f"{key} has quant_method {method!r}, but must have {packed!r}: save the weights without quantization"
            )
        elif method == "fp8" and (block != [BLOCK, BLOCK] or found.get("fmt", "e4m3") != "e4m3"):
            wrong.append(
                f"{key} has weight_block_size {block} and fmt {found.get('fmt', 'e4m3')!r}, but must have "
                f"{[BLOCK, BLOCK]} and 'e4m3'"
            )
    return wrong


PATTERNS = {"window_layers": windowed_layers, "rope_layers": rotated_layers}
"""Patterns of layers, of which several are the same for a number of layers."""


def _comparable(model: Model) -> dict[str, Any]:
    """Returns the effective settings, with patterns of layers as what they say of each layer."""
    settings = effective_settings(model)
    return settings | {name: of(model) for name, of in PATTERNS.items() if name in settings}


CLASSIFIER = "ForSequenceClassification"
ENDINGS: Mapping[str, str] = {"choices": "ForMultipleChoice", "spans": "ForQuestionAnswering"}
"""Heads of finetuning -> suffix of transformers' classes with such a head; spans only with BERT."""


def head_settings(config: Json, endings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns mtjax's settings of the head that a config.json describes.

    Args:
      config: the config.json.
      endings: mtjax's names of heads -> suffixes of classes that the type has in addition to `CLASSIFIER`.
    """
    names = config.get("architectures") or ()
    for head, ending in (endings or {}).items():
        if any(name.endswith(ending) for name in names):
            return {"head": head} | ({"num_labels": CHOICES} if head == "choices" else {})
    if not any(name.endswith(CLASSIFIER) for name in names):
        return {"head": "language"}
    # transformers' default: two classes.
    labels = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))
    # transformers takes one output for a regression where problem_type does not say.
    if config.get("problem_type") == "regression" or labels == 1:
        return {"head": "regression"}
    return {"head": "classification", "num_labels": labels}


def head_json(model: Model, name: str, architecture: str, endings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the keys of config.json for a model's head.

    Args:
      model: the model, with any head.
      name: prefix of the classes of its type.
      architecture: the class with the language head.
      endings: as in `head_settings`; any other head is written as a classifier, which `ModelType.misfits` then rejects.
    """
    if model.head == "language":
        return {"architectures": [architecture]}
    if model.head in (endings or {}):
        return {"architectures": [f"{name}{(endings or {})[model.head]}"]}
    kind = "regression" if model.head == "regression" else "single_label_classification"
    return {
        "architectures": [f"{name}{CLASSIFIER}"],
        "problem_type": kind,
        **labels_json([f"LABEL_{number}" for number in range(num_outputs(model))]),
    }


def labels_json(labels: Sequence[str]) -> dict[str, Any]:
    """Returns the keys of config.json for the names of classes."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def activation_name(model: Model) -> str:
    """Returns transformers' name of a model's activation; "relu" for others, which `ModelType.misfits` then rejects."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation), "relu")


def tensors_without(names: Iterable[str], prefix: str) -> bool:
    """Returns whether no tensor has the prefix of a model with a head, so that it is a bare model."""
    return bool(prefix) and not any(name.startswith(prefix) for name in names)
