"""The best validation of a run so far, and early stopping."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """The metric that selects the best checkpoint."""

    metric: str
    """Its name in the metrics of a step."""
    higher_is_better: bool = True
    patience: int | None = None
    """Validations in a row without a better one after which the run ends; None for no early stopping."""


class Best:
    """The best validation so far, by a goal.

    It is not saved: a resumed run rebuilds it from the metrics of earlier steps.

    Attributes:
      step: step of the best validation; 0 before the first.
      value: value of its metric.
      since: number of validations after it.
    """

    def __init__(self, goal: Goal, history: Iterable[Mapping[str, Any]] = ()) -> None:
        self.goal, self.step, self.value, self.since = goal, 0, 0.0, 0
        for entry in history:
            self.update(entry)

    def update(self, entry: Mapping[str, Any]) -> bool:
        """Adds the metrics of a step; returns whether they are the best so far."""
        if self.goal.metric not in entry:
            return False
        if not self.is_better(entry):
            self.since += 1
            return False
        self.step, self.value, self.since = entry["step"], float(entry[self.goal.metric]), 0
        return True

    def is_better(self, entry: Mapping[str, Any]) -> bool:
        """Returns whether the metrics of a step are better than the best so far."""
        value, sign = float(entry.get(self.goal.metric, math.nan)), 1 if self.goal.higher_is_better else -1
        # NaN is worse than anything; an equal value is not better, so that patience runs out on a plateau.
        return not math.isnan(value) and (not self.step or sign * value > sign * self.value)

    @property
    def is_over(self) -> bool:
        """Whether the goal's patience is exhausted."""
        return self.goal.patience is not None and self.since >= self.goal.patience
