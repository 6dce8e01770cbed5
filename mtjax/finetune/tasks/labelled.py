"""Tasks with a label per row: classification or regression of one or two texts."""

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
from mtjax.finetune.rows import Example, Examples, FieldNames, read_examples
from mtjax.finetune.samples import Ids, LazyRows, RowEncoder, Samples
from mtjax.finetune.tasks.task import DEV, TABLES, HeldOut, Scores


@dataclass(frozen=True)
class Labelled:
    """A `Task` whose rows have a label each."""

    name: str
    head: Literal["classification", "regression"]
    texts: tuple[tuple[str, ...], ...]
    """Names of the one or two fields with texts; the first alternative that a file has is used."""
    label: tuple[str, ...]
    """Names of the field with the label; the first that a file has is used."""
    metrics: Callable[[np.ndarray, np.ndarray], Scores]
    """Computes metrics from outputs [rows, outputs] and labels [rows] (class numbers or values)."""
    goal: str
    """The metric by which checkpoints are compared; higher is better."""
    labels: tuple[str, ...] | None = None
    """Classes in the order of the outputs; None if determined by the rows."""
    held_out: tuple[HeldOut, ...] = (DEV,)
    train: tuple[str, ...] = ("train",)
    endings: tuple[str, ...] = TABLES
    when_long: str = "they are truncated"

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """Reads the rows of TSV or JSON lines."""
        return read_examples(path, self.fields(config), labelled=labelled)

    def fields(self, config: Config) -> FieldNames:
        """Returns the names of the fields: those in the options, else the task's.

        Raises:
          UserError: the task's fields can't be changed, or there are more than two texts.
        """
        options = config.finetuning
        check_own_fields(self.name, self.labels, config)
        texts = (tuple(options.text_fields.split(",")),) if options.text_fields else self.texts
        if len(texts[0]) > 2:
            raise UserError(
                f"--text-fields {options.text_fields} names {len(texts[0])} fields, but must name one or two"
            )
        return FieldNames(texts, (options.label_field,) if options.label_field else self.label)

    def labels_of(self, config: Config, examples: Sequence[Example]) -> tuple[str, ...] | None:
        """Returns the task's labels, those in the options, or those that occur in the rows; None for a regression."""
        if self.head == "regression":
            return None
        return self.labels or config.finetuning.labels or classes_of(examples)

    def encoded(
        self, examples: Sequence[Example], encoder: RowEncoder, config: Config, which: str = ""
    ) -> "EncodedRows":
        """Encodes each example as a row."""
        options, model = config.finetuning, config.model
        # Converted weights may have no label names: use numbers.
        labels = None if self.head == "regression" else options.labels or tuple(map(str, range(model.num_labels)))
        return EncodedRows(self.metrics, *numbered(examples, labels, which), encoder)


def check_own_fields(name: str, labels: tuple[str, ...] | None, config: Config) -> None:
    """Checks that options don't name fields or labels of a task for which they are fixed.

    Raises:
      UserError: they do.
    """
    options = config.finetuning
    names_fields = bool(options.text_fields or options.label_field)
    # The config of a run contains the task's labels.
    from_run = not names_fields and options.labels == labels
    if labels is not None and (names_fields or options.labels) and not from_run:
        raise UserError(f"the fields and labels of {name} are fixed: use --task classify to name others")


def numbered(
    examples: Sequence[Example], labels: tuple[str, ...] | None, which: str
) -> tuple[list[Example], tuple[str, ...] | None, str]:
    """Selects the examples with valid labels; for predictions (`which` is ""), all examples.

    Returns:
      The examples, the labels, and a note on skipped examples.
    """
    if not which:
        return list(examples), labels, ""
    good, _, note = label_numbers(examples, labels, which)
    return good, labels, note


class EncodedRows:
    """Encoded rows with a label each: an `Encoded`.

    Args:
      metrics: computes metrics from outputs and labels.
      examples: the rows.
      labels: names of classes; None for a regression.
      note: note on rows that were skipped.
      encoder: encodes the rows.
    """

    def __init__(
        self,
        metrics: Callable[[np.ndarray, np.ndarray], Scores],
        examples: Sequence[Example],
        labels: tuple[str, ...] | None,
        note: str,
        encoder: RowEncoder,
    ) -> None:
        self.metrics, self.examples, self.labels, self.note = metrics, examples, labels, note
        self.format, self.ids = encoder.format, self._ids(encoder)

    def _ids(self, encoder: RowEncoder) -> list[Ids]:
        return encoder.encode([example.texts for example in self.examples])

    @property
    def lengths(self) -> Sequence[int]:
        """Length of each row without truncation."""
        return [self.format.length(ids) for ids in self.ids]

    def samples(self, length: int) -> Samples:
        """Returns rows truncated to `length`; unknown labels are 0."""
        rows = LazyRows(self.ids, self.format, length)
        # Questions with choices have a row for each choice.
        rows_per_example = len(self.ids) // max(len(self.examples), 1)
        indices, numbers = self._known
        labels = np.zeros(len(self.examples), np.int32 if self.labels else np.float32)
        labels[indices] = numbers
        weights = np.ones(len(rows), np.float32)
        labels = np.repeat(labels, rows_per_example)
        return Samples(rows, labels, weights, length, self.format.pad, rows_per_example)

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the outputs unchanged."""
        return outputs

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Returns probabilities of classes; values of a regression unchanged."""
        return softmax(values) if self.labels else values

    def loss(self, values: np.ndarray) -> float:
        """Returns the mean cross-entropy of classes, or the mean squared error."""
        indices, numbers = self._known
        return mean_loss(values[indices], numbers)

    def scores(self, values: np.ndarray) -> Scores:
        """Returns the task's metrics; {} unless all rows have labels."""
        # Scores of a part of the rows would look like those of all.
        if any(example.label is None for example in self.examples):
            return {}
        indices, numbers = self._known
        return self.metrics(values[indices], numbers)

    def lines(self, values: np.ndarray) -> list[dict[str, Any]]:
        """Returns JSON for each row: its line in the file or its id, and label and probabilities, or the value."""
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
        """Indices of the examples with valid labels, and these labels as numbers."""
        labelled = [example for example in self.examples if example.label is not None]
        good, numbers, _ = label_numbers(labelled, self.labels, "given")
        # By identity: two rows of a file may be equal.
        indices = {id(example): index for index, example in enumerate(self.examples)}
        return [indices[id(example)] for example in good], numbers
