"""What every task is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

Scores = Mapping[str, float]
"""Metrics by name."""


@dataclass(frozen=True)
class HeldOut:
    """A set that validation reads."""

    suffix: str
    """Of the names of its metrics, with an underscore; empty for the set that a run is judged by."""
    stems: tuple[str, ...]
    """Names of its file, without folder and ending; the first that is there is read."""
    is_needed: bool = True


DEV = HeldOut("", ("dev", "valid", "validation"))


@dataclass(frozen=True)
class Task:
    """A task by its name."""

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
