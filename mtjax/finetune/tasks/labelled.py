"""Tasks with a label for each row: classes or numbers of a text or of two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.finetune.labels import classes_of, label_numbers
from mtjax.finetune.metrics import mean_loss, softmax
from mtjax.finetune.rows import Example, Examples, Fields, read_examples
from mtjax.finetune.samples import Encoder, Ids, Joined, Samples
from mtjax.finetune.tasks.task import DEV, TABLES, HeldOut, Scores


@dataclass(frozen=True)
class Labelled:
    """A task whose rows have a label each: a `Task`."""

    name: str
    head: Literal["classification", "regression"]
    texts: tuple[tuple[str, ...], ...]
    """Names of the fields with the texts, one or two; the first that a file has are read."""
    label: tuple[str, ...]
    """Names of the field with the label, likewise."""
    metrics: Callable[[np.ndarray, np.ndarray], Scores]
    """From outputs [rows, outputs] and labels [rows]: classes' numbers, or numbers."""
    goal: str
    """The metric that a run is judged by; more is better."""
    labels: tuple[str, ...] | None = None
    """Classes in the order of the outputs; None where the rows decide."""
    held_out: tuple[HeldOut, ...] = (DEV,)
    train: tuple[str, ...] = ("train",)
    endings: tuple[str, ...] = TABLES
    when_long: str = "are cut"

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """The rows of a table or of JSON lines."""
        return read_examples(path, self.fields(config), labelled=labelled)

    def fields(self, config: Config) -> Fields:
        """The names of the fields: the user's, or the task's own.

        Raises:
          UserError: the task's own can't be changed.
        """
        options = config.finetuning
        check_own_fields(self.name, self.labels, config)
        texts = (tuple(options.text_fields.split(",")),) if options.text_fields else self.texts
        if len(texts[0]) > 2:
            raise UserError(
                f"--text-fields {options.text_fields} names {len(texts[0])} fields, and may name one or two"
            )
        return Fields(texts, (options.label_field,) if options.label_field else self.label)

    def labels_of(self, config: Config, examples: Sequence[Example]) -> tuple[str, ...] | None:
        """The task's, the user's, or those that occur."""
        if self.head == "regression":
            return None
        return self.labels or config.finetuning.labels or classes_of(examples)

    def encoded(self, examples: Sequence[Example], encoder: Encoder, config: Config, which: str = "") -> "EncodedRows":
        """A row for each."""
        options, model = config.finetuning, config.model
        labels = None if self.head == "regression" else options.labels or tuple(map(str, range(model.num_labels)))
        return EncodedRows(self.metrics, *numbered(examples, labels, which), encoder)


def check_own_fields(name: str, labels: tuple[str, ...] | None, config: Config) -> None:
    """Checks that nobody names fields or labels of a task that has its own.

    Raises:
      UserError: somebody does.
    """
    options = config.finetuning
    names_fields = bool(options.text_fields or options.label_field)
    as_noted = not names_fields and options.labels == labels  # in the config of a run
    if labels is not None and (names_fields or options.labels) and not as_noted:
        raise UserError(f"the fields and labels of {name} are fixed: use --task classify to name others")


def numbered(
    examples: Sequence[Example], labels: tuple[str, ...] | None, which: str
) -> tuple[list[Example], tuple[str, ...] | None, str]:
    """The examples of a set that have a label which is one - outside of a set, all - the labels, and a note."""
    if not which:
        return list(examples), labels, ""
    good, _, note = label_numbers(examples, labels, which)
    return good, labels, note


class EncodedRows:
    """Rows with a label each: an `Encoded`.

    Args:
      metrics: from outputs and labels.
      examples: the rows.
      labels: names of classes; None where labels are numbers.
      note: which rows were left out.
      encoder: makes tokens of them.
    """

    def __init__(
        self,
        metrics: Callable[[np.ndarray, np.ndarray], Scores],
        examples: Sequence[Example],
        labels: tuple[str, ...] | None,
        note: str,
        encoder: Encoder,
    ) -> None:
        self.metrics, self.examples, self.labels, self.note = metrics, examples, labels, note
        self.format, self.ids = encoder.format, self._ids(encoder)

    def _ids(self, encoder: Encoder) -> list[Ids]:
        return encoder.ids([example.texts for example in self.examples])

    @property
    def lengths(self) -> Sequence[int]:
        """Of each row that is not cut."""
        return [self.format.length(ids) for ids in self.ids]

    def samples(self, length: int) -> Samples:
        """Rows that are cut where they are longer; labels are 0 where they are not known."""
        rows, each = Joined(self.ids, self.format, length), len(self.ids) // max(len(self.examples), 1)
        kind = np.int32 if self.labels else np.float32
        places, numbers = self._known
        labels = np.zeros(len(self.examples), kind)
        labels[places] = numbers
        return Samples(rows, np.repeat(labels, each), np.ones(len(rows), np.float32), length, self.format.pad, each)

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """As they are."""
        return outputs

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Probabilities of classes; numbers as they are."""
        return softmax(values) if self.labels else values

    def loss(self, values: np.ndarray) -> float:
        """Cross-entropy of classes, squared error of numbers."""
        places, numbers = self._known
        return mean_loss(values[places], numbers)

    def scores(self, values: np.ndarray) -> Scores:
        """The task's metrics, where all rows have labels."""
        if any(example.label is None for example in self.examples):
            return {}
        places, numbers = self._known
        return self.metrics(values[places], numbers)

    def lines(self, values: np.ndarray) -> list[dict[str, Any]]:
        """A row's line in its file or its name, the label and the probabilities, or the value."""
        rows = zip(self.examples, values.tolist(), strict=True)
        if self.labels is None:
            return [{"line": example.line, "value": value} for example, (value,) in rows]
        names = self.labels
        return [
            {**e.key, "label": names[int(np.argmax(p))], "probabilities": dict(zip(names, p, strict=True))}
            for e, p in rows
        ]

    @cached_property
    def _known(self) -> tuple[list[int], np.ndarray]:
        """Places of the examples whose label is one, and these as numbers."""
        labelled = [example for example in self.examples if example.label is not None]
        good, numbers, _ = label_numbers(labelled, self.labels, "given")
        places = {id(example): place for place, example in enumerate(self.examples)}
        return [places[id(example)] for example in good], numbers
