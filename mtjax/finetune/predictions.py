"""What finetuned models say of rows: probabilities of classes or numbers, of one model or of several on average."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Parallel
from mtjax.convert.saved_model import Hints, SavedModel, for_rows, vocab_multiple_for
from mtjax.errors import UserError
from mtjax.finetune.metrics import Scores
from mtjax.finetune.outputs import Outputs
from mtjax.finetune.samples import Encoder
from mtjax.finetune.tasks.registry import task_of
from mtjax.finetune.tasks.task import Encoded
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.mesh import attach_devices
from mtjax.theory.mesh import parse_mesh


@dataclass(frozen=True)
class Predictions:
    """Of rows, in their order.

    Attributes:
      encoded: the rows as the model read them.
      labels: names of its classes; None where it has none.
      note: which rows were left out.
      values: float64, of each row: probabilities of classes or choices, [rows, classes], a number, [rows, 1], or the
        logits of each of its tokens, [rows, sequence, 2].
    """

    encoded: Encoded
    labels: tuple[str, ...] | None
    note: str
    values: np.ndarray

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One row of JSON for each: its line in the file, and the answer."""
        return self.encoded.lines(self.values)

    @cached_property
    def scores(self) -> Scores:
        """The task's metrics, where the rows have answers; else nothing."""
        return self.encoded.scores(self.values)


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
    devices = attach_devices(shape)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(shape)))
    config = saved.config
    if config.model.head == "language":
        raise UserError(f"{source} has no head for a task: finetune it first, mtjax finetune --init-from {source}")
    task = task_of(config)
    examples = task.examples(data, config, labelled=False)
    placed = ShardedModel(for_rows(config, Parallel(mesh=mesh), rows, compute_dtype=dtype), devices)
    encoded = task.encoded(examples.rows, Encoder(saved.tokenizer()[1], config.model.family), config)
    outputs = Outputs(placed).of(saved.parameters(placed), encoded.samples(config.model.sequence_length))
    values = encoded.comparable(encoded.read(outputs).astype(np.float64))
    return Predictions(encoded, task.labels or config.finetuning.labels, examples.note, values)


def mean(members: Sequence[Predictions]) -> Predictions:
    """The ensemble: the mean of the members' probabilities, or numbers, as the paper's of five models.

    Raises:
      UserError: they have different classes.
    """
    first = members[0]
    for other in members[1:]:
        if other.labels != first.labels:
            raise UserError(f"one of the models has the classes {first.labels}, and another {other.labels}")
    if len({member.values.shape for member in members}) > 1:
        raise UserError("the models read rows of different lengths: finetune them with the same --sequence-length")
    values = np.mean([member.values for member in members], axis=0)
    return Predictions(first.encoded, first.labels, first.note, values)
