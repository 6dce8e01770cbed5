"""What every task is: where its examples are, what a model reads of them, and how its answers are judged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from mtjax.config import Config
from mtjax.finetune.metrics import Scores
from mtjax.finetune.rows import Examples
from mtjax.finetune.samples import Encoder, Samples

TABLES = (".tsv", ".jsonl", ".json", ".txt")
"""Endings of files of rows."""


@dataclass(frozen=True)
class HeldOut:
    """A set that validation reads."""

    suffix: str
    """Of the names of its metrics, with an underscore; empty for the set that a run is judged by."""
    stems: tuple[str, ...]
    """Names of its file, without folder and ending; the first that is there is read."""
    is_needed: bool = True


DEV = HeldOut("", ("dev", "valid", "validation"))


class Encoded(Protocol):
    """Examples in tokens.

    Outputs are what a model gives for their rows, [rows, ...] float32. `read` makes values of them, [examples or rows,
    ...]; several models' may be averaged once they are `comparable`.
    """

    note: str
    """Which examples were left out; empty where none were."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row that is not cut."""
        ...

    def samples(self, length: int) -> Samples:
        """Rows of `length` tokens.

        Raises:
          UserError: they have no room.
        """
        ...

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """Outputs in the order of what is asked."""
        ...

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Values that models agree on the meaning of: probabilities."""
        ...

    def loss(self, values: np.ndarray) -> float:
        """The mean loss, in float64, of values that were just read."""
        ...

    def scores(self, values: np.ndarray) -> Scores:
        """The metrics, of values read or compared; nothing where answers are not known."""
        ...

    def lines(self, values: np.ndarray) -> list[dict[str, Any]]:
        """One row of JSON for each example, of compared values."""
        ...


class HasFiles(Protocol):
    """What of a task says where its rows are."""

    @property
    def name(self) -> str:
        """As `--task` names it."""
        ...

    @property
    def train(self) -> tuple[str, ...]:
        """Names of the file for training, without ending."""
        ...

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """What validation reads."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """Of its files; empty for a folder."""
        ...

    def examples(self, path: Path, config: Config) -> Examples:
        """The examples of a file or folder.

        Raises:
          UserError: it is not the task's.
        """
        ...


class Task(HasFiles, Protocol):
    """A task by its name."""

    @property
    def head(self) -> Literal["classification", "regression", "choices", "spans"]:
        """Of the model."""
        ...

    @property
    def goal(self) -> str:
        """The metric that a run is judged by; more is better."""
        ...

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Classes or choices in the order of the outputs; None where the rows decide, or there are none."""
        ...

    @property
    def when_long(self) -> str:
        """What becomes of rows that are too long."""
        ...

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """The examples of a file or folder; if they need not be `labelled`, answers where they are.

        Raises:
          UserError: it is not the task's.
        """
        ...

    def labels_of(self, config: Config, examples: Sequence[Any]) -> tuple[str, ...] | None:
        """The classes of a run that trains on examples; None where there are none.

        Raises:
          UserError: they have no classes.
        """
        ...

    def encoded(self, examples: Sequence[Any], encoder: Encoder, config: Config, which: str = "") -> Encoded:
        """Examples in tokens: of the set `which` with their answers, which are numbers then; of no set without.

        Raises:
          UserError: most answers are none.
        """
        ...
