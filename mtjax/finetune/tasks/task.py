"""The interface of tasks: reading examples, encoding them, and computing metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from mtjax.config import Config
from mtjax.finetune.metrics import Scores
from mtjax.finetune.rows import Examples
from mtjax.finetune.samples import RowEncoder, Samples

TABLES = (".tsv", ".jsonl", ".json", ".txt")
"""Suffixes of files with rows."""


@dataclass(frozen=True)
class HeldOut:
    """A validation set."""

    suffix: str
    """Suffix of its metrics' names, with an underscore; empty for the set by which checkpoints are compared."""
    stems: tuple[str, ...]
    """Names of its file, without folder and suffix; the first that exists is read."""
    is_needed: bool = True


DEV = HeldOut("", ("dev", "valid", "validation"))


class Encoded(Protocol):
    """Encoded examples.

    A model's outputs for their rows are float32 [rows, ...]. `read` converts them to values [examples or rows, ...],
    and `comparable` to values that can be averaged over several models.
    """

    note: str
    """Note on examples that were skipped; empty if there are none."""

    @property
    def lengths(self) -> Sequence[int]:
        """Length of each row without truncation."""
        ...

    def samples(self, length: int) -> Samples:
        """Returns rows of `length` tokens.

        Raises:
          UserError: `length` is too short.
        """
        ...

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """Converts outputs to values."""
        ...

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Converts values to ones that can be averaged over models, such as probabilities."""
        ...

    def loss(self, values: np.ndarray) -> float:
        """Returns the mean loss of values from `read`, computed in float64."""
        ...

    def scores(self, values: np.ndarray) -> Scores:
        """Returns the metrics of values from `read` or `comparable`; {} if labels are unknown."""
        ...

    def lines(self, values: np.ndarray) -> list[dict[str, Any]]:
        """Returns a JSON object for each example from values of `comparable`."""
        ...


class HasFiles(Protocol):
    """The part of a task that locates and reads its files."""

    @property
    def name(self) -> str:
        """Name, as in `--task`."""
        ...

    @property
    def train(self) -> tuple[str, ...]:
        """Names of the training file, without suffix."""
        ...

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The validation sets."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """Suffixes of its files; "" for a folder."""
        ...

    def examples(self, path: Path, config: Config) -> Examples:
        """Reads the examples of a file or folder.

        Raises:
          UserError: it is not in the task's format.
        """
        ...


class Task(HasFiles, Protocol):
    """A finetuning task."""

    @property
    def head(self) -> Literal["classification", "regression", "choices", "spans"]:
        """The kind of head."""
        ...

    @property
    def goal(self) -> str:
        """The metric by which checkpoints are compared; higher is better."""
        ...

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Classes or choices in the order of the outputs; None if determined by the rows, or if there are none."""
        ...

    @property
    def when_long(self) -> str:
        """What happens to rows that are longer than the sequence length, for messages."""
        ...

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """Reads the examples of a file or folder; labels are optional if not `labelled`.

        Raises:
          UserError: it is not in the task's format.
        """
        ...

    def labels_of(self, config: Config, examples: Sequence[Any]) -> tuple[str, ...] | None:
        """Returns the classes for training on these examples; None if the task has none.

        Raises:
          UserError: the examples' labels are not classes.
        """
        ...

    def encoded(self, examples: Sequence[Any], encoder: RowEncoder, config: Config, which: str = "") -> Encoded:
        """Encodes examples.

        Args:
          examples: the examples.
          encoder: encodes their texts.
          config: the run's config.
          which: name of the set, whose labels must be valid; "" for predictions.

        Raises:
          UserError: most labels are invalid.
        """
        ...
