"""Conversion of labels in files to class numbers or values, and class weights."""

import math
from collections.abc import Sequence

import numpy as np

from mtjax.config import Config
from mtjax.config.field_metadata import HEADS
from mtjax.errors import UserError, nearest, shortened
from mtjax.finetune.rows import SHOWN, Example


def classes_of(examples: Sequence[Example]) -> tuple[str, ...]:
    """Returns the labels that occur, sorted numerically if all are integers, else alphabetically.

    Raises:
      UserError: there are fewer than two, or too many to be classes.
    """
    labels = {example.label or "" for example in examples}
    # More than one class per two rows suggests texts or numbers instead of classes.
    if not 2 <= len(labels) <= min(HEADS, max(len(examples) // 2, 2)):
        named = shortened(", ".join(sorted(labels)), 100)
        raise UserError(
            f"{len(examples):,} training rows have {len(labels):,} different labels ({named}): these are not classes"
        )
    # As texts, class 10 would come before class 2.
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def label_numbers(
    examples: Sequence[Example], labels: Sequence[str] | None, which: str
) -> tuple[list[Example], np.ndarray, str]:
    """Converts labels to numbers.

    Args:
      examples: rows with labels.
      labels: names of classes; None for a regression.
      which: name of the set, for the note.

    Returns:
      The examples with a valid label, their labels (int32 class numbers, or float32), and a note on the others.

    Raises:
      UserError: most labels are invalid.
    """
    numbers_of = None if labels is None else {label: number for number, label in enumerate(labels)}
    pairs = [(example, _number(example.label or "", numbers_of)) for example in examples]
    good = [(example, number) for example, number in pairs if number is not None]
    wrong = [shortened(example.label or "", 40) for example, number in pairs if number is None]
    note = ""
    if wrong:
        kind = "numbers" if labels is None else f"among {', '.join(labels)}"
        named = ", ".join(map(repr, list(dict.fromkeys(wrong))[:SHOWN]))
        note = f"{len(wrong):,} of {len(examples):,} {which} rows are skipped: labels such as {named} are not {kind}"
        if len(wrong) > len(good):
            raise UserError(f"{note}: is it the file of another task?")
    numbers = np.array([number for _, number in good], np.float32 if labels is None else np.int32)
    return [example for example, _ in good], numbers, note


def _number(label: str, numbers_of: dict[str, int] | None) -> float | None:
    """Returns the class number of a label, or its value if there are no classes; None if it is invalid."""
    if numbers_of is not None:
        return numbers_of.get(label)
    try:
        return number if math.isfinite(number := float(label)) else None
    except ValueError:
        return None


def weights_of(config: Config, numbers: np.ndarray) -> np.ndarray:
    """Returns the weight of each training row, by its class.

    Raises:
      UserError: `class_weights` is invalid, or the task has no classes.
    """
    text, labels = config.finetuning.class_weights, config.finetuning.labels
    if text is None:
        return np.ones(len(numbers), np.float32)
    if config.model.head != "classification" or labels is None:
        raise UserError(
            f"--class-weights {text} has no effect on {config.finetuning.task}, a task without classes: remove it"
        )
    if text == "balanced":
        # A class that --labels names may have no rows.
        counts = np.bincount(numbers, minlength=len(labels))
        # scikit-learn's "balanced": every class has the same total weight.
        return (len(numbers) / (len(labels) * np.maximum(counts, 1))).astype(np.float32)[numbers]
    weights = dict.fromkeys(labels, 1.0)
    for item in text.split(","):
        label, _, value = item.rpartition("=")
        if label not in weights:
            raise UserError(f"--class-weights {item!r} names no class{nearest(label, weights)}: use CLASS=WEIGHT")
        weights[label] = number if (number := _number(value, None)) is not None else -1.0
        if weights[label] < 0:
            raise UserError(f"--class-weights {item!r}: the weight must be a number, 0 or more")
    chosen = np.array(list(weights.values()), np.float32)[numbers]
    if not chosen.any():
        raise UserError(f"--class-weights {text} gives all training rows weight 0")
    return chosen
