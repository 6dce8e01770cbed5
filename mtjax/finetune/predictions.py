"""What finetuned models say of rows: probabilities of classes or numbers, of one model or of several on average."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Config, Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.errors import UserError
from mtjax.finetune.files import fields_of
from mtjax.finetune.labels import label_numbers
from mtjax.finetune.outputs import Outputs
from mtjax.finetune.rows import Example, Examples, read_examples
from mtjax.finetune.samples import Encoder, Samples
from mtjax.finetune.tasks.registry import CLASSIFY, REGRESS, TASKS
from mtjax.finetune.tasks.task import Scores, Task
from mtjax.models.placed import Placed
from mtjax.sharding.mesh import attach_devices
from mtjax.theory.mesh import check_implemented, parse_mesh


@dataclass(frozen=True)
class Predictions:
    """Of rows, in their order.

    Attributes:
      task: what the model has learnt.
      labels: names of its classes; None where it predicts numbers.
      examples: the rows, and which were left out.
      values: [rows, classes] probabilities, or [rows, 1] numbers; float64.
    """

    task: Task
    labels: tuple[str, ...] | None
    examples: Examples
    values: np.ndarray

    def lines(self) -> list[dict[str, Any]]:
        """One row of JSON for each: its line in the file, and the answer."""
        rows = zip(self.examples.rows, self.values.tolist(), strict=True)
        if self.labels is None:
            return [{"line": example.line, "value": value} for example, (value,) in rows]
        names = self.labels
        return [
            {"line": e.line, "label": names[int(np.argmax(p))], "probabilities": dict(zip(names, p, strict=True))}
            for e, p in rows
        ]

    @cached_property
    def scores(self) -> Scores:
        """The task's metrics, where the rows have labels; else nothing."""
        if any(example.label is None for example in self.examples.rows):
            return {}
        good, numbers, _ = label_numbers(self.examples.rows, self.labels, "given")
        places = {id(example): place for place, example in enumerate(self.examples.rows)}
        return self.task.metrics(self.values[[places[id(example)] for example in good]], numbers)


def predict(source: str, data: Path, *, mesh: str = "1x1", rows: int = 32, dtype: str = "float32") -> Predictions:
    """Runs the weights that `source` names over the rows of a file.

    Args:
      source: a finetuned run (its best checkpoint), a converted folder, or hf:DIR.
      data: TSV or JSON lines with the task's fields; labels may be there.
      mesh: DATAxMODEL.
      rows: that each data rank reads at once.
      dtype: of products.

    Raises:
      UserError: the weights have no head of a task, or the rows can't be read.
    """
    shape = parse_mesh(mesh)
    check_implemented(shape)
    devices = attach_devices(shape)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(shape)))
    config = saved.config
    if config.model.head == "language":
        raise UserError(f"{source} has no head for a task: finetune it first, mtjax finetune --init-from {source}")
    task = task_of(config)
    fields = fields_of(config, task)
    examples = read_examples(data, fields, labelled=False)
    placed = Placed(for_rows(config, Parallel(mesh=mesh), rows, compute_dtype=dtype), devices)
    samples = unlabelled(examples.rows, Encoder(saved.tokenizer()[1], config.model.family), config)
    outputs = Outputs(placed).of(saved.parameters(placed), samples).astype(np.float64)
    if config.model.head == "regression":
        return Predictions(task, None, examples, outputs)
    labels = config.finetuning.labels or tuple(map(str, range(config.model.num_labels)))
    return Predictions(task, labels, examples, softmax(outputs))


def mean(members: Sequence[Predictions]) -> Predictions:
    """The ensemble: the mean of the members' probabilities, or numbers, as the paper's of five models.

    Raises:
      UserError: they have different classes.
    """
    first = members[0]
    for other in members[1:]:
        if other.labels != first.labels:
            raise UserError(f"one of the models has the classes {first.labels}, and another {other.labels}")
    values = np.mean([member.values for member in members], axis=0)
    return Predictions(first.task, first.labels, first.examples, values)


def task_of(config: Config) -> Task:
    """What a finetuned model has learnt; of converted heads, which don't say, a task of the user's own."""
    if config.finetuning.task != "none":
        return TASKS[config.finetuning.task]
    return CLASSIFY if config.model.head == "classification" else REGRESS


def unlabelled(examples: list[Example], encoder: Encoder, config: Config) -> Samples:
    """Samples of the model's own length, with a label that nothing reads."""
    length = config.model.sequence_length
    rows = [encoder.row(ids, length) for ids in encoder.ids(examples)]
    kind = np.int32 if config.model.head == "classification" else np.float32
    return Samples(rows, np.zeros(len(rows), kind), np.ones(len(rows), np.float32), length, encoder.pad)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last dimension."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
