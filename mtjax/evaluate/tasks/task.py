"""The interface of tasks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.data import Tokenizer
from mtjax.evaluate.rows import RowScores, ScoredRow

Results = Mapping[str, float | int]
"""Results by name, in the order in which they are printed."""


@dataclass(frozen=True)
class RowSettings:
    """Lengths and prefix of rows."""

    length: int
    """Most tokens that a row predicts."""
    overlap: int
    """Tokens that each window but the first scores."""
    first_tokens: tuple[int, ...]
    """Ids that are prepended to a text so that all of its tokens are scored; at least one."""


@dataclass(frozen=True)
class EvaluationTask:
    """The rows of a data file, and the results computed from their scores."""

    rows: Sequence[ScoredRow]
    results: Callable[[RowScores], Results]
    note: str = ""
    """Note on the data, for the user."""


@dataclass(frozen=True)
class NamedTokenizer:
    """A tokenizer with its name."""

    name: str
    """As the user gave it, or as the run or the weights name it, for messages."""
    tokenizer: Tokenizer


@dataclass(frozen=True)
class TaskKind:
    """A kind of task, by its name."""

    name: str
    measures: Mapping[str, bool]
    """Results by which checkpoints can be compared, the main one first -> whether higher is better."""
    open: Callable[[Path, NamedTokenizer, RowSettings], EvaluationTask]
    """Reads a data file; raises `UserError` if it is not in the task's format."""


def begins_with(what: str, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns a note on the tokens that are prepended to a text; [] if there are none."""
    return [f"{what} begins with {' '.join(map(tokenizer.token, ids))}"] if ids else []


def perplexity_of(loss: float) -> float:
    """Returns `exp(loss)`; the loss is limited to 700, as exp would overflow float64, and JSON has no infinity."""
    return math.exp(min(loss, 700))
