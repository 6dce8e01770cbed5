"""Labels as files write them -> numbers of classes, or numbers; and the weights of classes."""

import math
from collections.abc import Sequence

import numpy as np

from mtjax.config import Config
from mtjax.config.field_metadata import HEADS
from mtjax.errors import UserError, nearest, shortened
from mtjax.finetune.rows import SHOWN, Example


def classes_of(examples: Sequence[Example]) -> tuple[str, ...]:
    """The labels that occur, whole numbers by their size, others by the alphabet.

    Raises:
      UserError: there are fewer than two, or so many that they can't be classes.
    """
    labels = {example.label or "" for example in examples}
    if not 2 <= len(labels) <= min(HEADS, max(len(examples) // 2, 2)):
        named = shortened(", ".join(sorted(labels)), 100)
        raise UserError(f"{len(examples):,} training rows have {len(labels):,} different labels ({named}): not classes")
    if all(label.lstrip("-").isdecimal() for label in labels):
        return tuple(sorted(labels, key=int))
    return tuple(sorted(labels))


def label_numbers(
    examples: Sequence[Example], labels: Sequence[str] | None, which: str
) -> tuple[list[Example], np.ndarray, str]:
    """The examples with a label that is one, these as int32 or, without classes, float32, and a note on the others.

    Raises:
      UserError: most labels are none.
    """
    place = None if labels is None else {label: number for number, label in enumerate(labels)}
    pairs = [(example, _number(example.label or "", place)) for example in examples]
    good = [(example, number) for example, number in pairs if number is not None]
    wrong = [shortened(example.label or "", 40) for example, number in pairs if number is None]
    note = ""
    if wrong:
        kind = "numbers" if labels is None else f"among {', '.join(labels)}"
        named = ", ".join(map(repr, list(dict.fromkeys(wrong))[:SHOWN]))
        note = f"{len(wrong):,} of {len(examples):,} {which} rows are left out: labels such as {named} are not {kind}"
        if len(wrong) > len(good):
            raise UserError(f"{note}: is it another task's file?")
    numbers = np.array([number for _, number in good], np.float32 if labels is None else np.int32)
    return [example for example, _ in good], numbers, note


def _number(label: str, place: dict[str, int] | None) -> float | None:
    if place is not None:
        return place.get(label)
    try:
        return number if math.isfinite(number := float(label)) else None
    except ValueError:
        return None


def weights_of(config: Config, numbers: np.ndarray) -> np.ndarray:
    """The weight of each training row, by its class.

    Raises:
      UserError: `class_weights` is wrong, or the task has no classes.
    """
    text, labels = config.finetuning.class_weights, config.finetuning.labels
    if text is None:
        return np.ones(len(numbers), np.float32)
    if config.model.head != "classification" or labels is None:
        raise UserError(f"--class-weights {text}: the task {config.finetuning.task} has no classes")
    if text == "balanced":
        counts = np.bincount(numbers, minlength=len(labels))
        return (len(numbers) / (len(labels) * np.maximum(counts, 1))).astype(np.float32)[numbers]
    weights = dict.fromkeys(labels, 1.0)
    for item in text.split(","):
        label, _, value = item.rpartition("=")
        if label not in weights:
            raise UserError(f"--class-weights {item!r} names no class{nearest(label, weights)}: say NAME=NUMBER")
        weights[label] = number if (number := _number(value, None)) is not None else -1.0
        if weights[label] < 0:
            raise UserError(f"--class-weights {item!r}: the weight must be a number, 0 or more")
    chosen = np.array(list(weights.values()), np.float32)[numbers]
    if not chosen.any():
        raise UserError(f"--class-weights {text} leaves no row with a weight above 0")
    return chosen
