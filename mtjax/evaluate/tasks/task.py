"""What every task is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.data import Tokenizer
from mtjax.evaluate.rows import Row, Scores

Results = Mapping[str, float | int]
"""By name, in the order in which they are shown."""


@dataclass(frozen=True)
class Settings:
    """How rows are cut."""

    length: int
    """Tokens that the model reads at once."""
    overlap: int
    """Tokens that each window but the first counts."""
    first_tokens: tuple[int, ...]
    """Ids that stand before a text of which every token is predicted; at least one."""


@dataclass(frozen=True)
class Task:
    """The rows of a data file, and what scores of them come to."""

    rows: Sequence[Row]
    results: Callable[[Scores], Results]
    note: str = ""
    """What the user should know of the data."""


@dataclass(frozen=True)
class Kind:
    """A task by its name."""

    name: str
    measures: Mapping[str, bool]
    """Results that a run can be judged by, the main one first, and whether more of it is better."""
    open: Callable[[Path, Tokenizer, Settings], Task]
    """Reads a data file; raises `UserError` where it is another task's."""


def begins_with(what: str, tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Says which tokens stand in front of a text; nothing where there are none."""
    return [f"{what} begins with {' '.join(map(tokenizer.token, ids))}"] if ids else []


def perplexity_of(loss: float) -> float:
    """`exp(loss)`; of losses above 700 as of 700, for a float has no room for more and JSON no infinity."""
    return math.exp(min(loss, 700))
