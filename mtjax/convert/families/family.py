"""The description of a Hugging Face family, from which reading, writing and refusing follow."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtjax.config import Config, Model, replace
from mtjax.config.model_identity import effective_settings
from mtjax.config.sizes import num_outputs
from mtjax.convert.table import Table
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError

Json = Mapping[str, Any]

CHOICES = 4
"""Of a question: config.json does not say how many, and RACE and SWAG have as many."""

ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "relu": "relu",
}
"""Their names of activations that are not gated, and ours."""


@dataclass(frozen=True)
class Field:
    """A setting of ours and the key of config.json that means the same."""

    ours: str
    theirs: str
    default: Any = None
    """What transformers takes when config.json does not say."""


def end_of_text(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Of models that read on: what the tokenizer puts before a text, else what stands between documents."""
    if tokenizer is None:
        return {}
    return {"bos_token_id": begin_of_text(tokenizer), "eos_token_id": tokenizer.eod}


def begin_of_text(tokenizer: Tokenizer) -> int:
    """The token that a tokenizer puts before a prompt, such as Llama's `<s>`, else the end of document."""
    front = added_tokens(tokenizer).front
    return front[0] if front else tokenizer.eod


@dataclass(frozen=True)
class Family:
    """One of transformers' model types."""

    model_type: str
    architecture: str
    """The class that `from_pretrained` makes."""
    table: Table
    fields: tuple[Field, ...]
    """Settings that only differ in name."""
    read: Callable[[Json, frozenset[str]], dict[str, Any]]
    """Our other settings from a config.json and the names of the tensors."""
    write: Callable[[Model], dict[str, Any]]
    """Their other keys from our settings."""
    only: Mapping[str, tuple[Any, ...]]
    """Keys that may have these values alone."""
    ids: Callable[[Tokenizer | None], dict[str, Any]] = end_of_text
    """What config.json says of a tokenizer of our own, or without one, where no config.json came with the weights."""

    def model_settings(self, config: Json, names: frozenset[str], source: str) -> dict[str, Any]:
        """Our settings of a model, from its config.json and the names of its tensors.

        Raises:
          UserError: it has what our model can't do: lists all of it.
        """
        wrong = [
            f"{key} is {config[key]!r}, and can be {' or '.join(map(repr, values))}"
            for key, values in self.only.items()
            if key in config and config[key] not in values
        ]
        if wrong:
            raise UserError(f"{source} is a {self.model_type} that mtjax does not have: {'; '.join(wrong)}")
        simple = {field.ours: config.get(field.theirs, field.default) for field in self.fields}
        return simple | self.read(config, names)

    def config_json(self, model: Model) -> dict[str, Any]:
        """The config.json of a model of ours."""
        simple = {field.theirs: getattr(model, field.ours) for field in self.fields}
        head = {"architectures": [self.architecture], "model_type": self.model_type}
        return head | simple | self.write(model)

    def misfits(self, model: Model) -> list[str]:
        """Settings of a model that this family has no place for."""
        back = replace(Config(), **self.model_settings(self.config_json(model), frozenset(), "")).model
        converted = effective_settings(back)
        ignored = ("vocab_multiple", "sentence_order")  # nothing of the weights' own; the tensors say
        return [
            f"{name} {value}"
            for name, value in effective_settings(model).items()
            if name not in ignored and converted.get(name) != value
        ]


CLASSIFIER = "ForSequenceClassification"
ENDINGS: Mapping[str, str] = {"choices": "ForMultipleChoice", "spans": "ForQuestionAnswering"}
"""What the names of transformers' classes end with that have one of finetuning's heads; the second are BERT's only."""


def head_settings(config: Json, endings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Our settings of the head that a config.json describes.

    Args:
      config: theirs.
      endings: of the classes that a family has besides those that classify, by our names of heads.
    """
    names = config.get("architectures") or ()
    for head, ending in (endings or {}).items():
        if any(name.endswith(ending) for name in names):
            return {"head": head} | ({"num_labels": CHOICES} if head == "choices" else {})
    if not any(name.endswith(CLASSIFIER) for name in names):
        return {"head": "language"}
    labels = len(config.get("id2label") or ()) or int(config.get("num_labels", 2))
    if config.get("problem_type") == "regression" or labels == 1:
        return {"head": "regression"}
    return {"head": "classification", "num_labels": labels}


def head_json(model: Model, name: str, architecture: str, endings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Their keys of our head.

    Args:
      model: with any head.
      name: what the classes of its family begin with.
      architecture: the class with the head of language.
      endings: as above; without its own, a head becomes one that classifies, and is refused when that is read.
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
    """Their keys of the names of classes."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def activation_name(model: Model) -> str:
    """Their name of our activation; one that they don't have comes back as another, and so is refused."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation), "relu")


def tensors_without(names: Iterable[str], prefix: str) -> bool:
    """Whether no tensor has the prefix of a model with its head: it is the bare model."""
    return bool(prefix) and not any(name.startswith(prefix) for name in names)
