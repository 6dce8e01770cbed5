"""Predictions of finetuned models for rows: probabilities of classes, or values; of one model or an ensemble."""

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
from mtjax.finetune.samples import RowEncoder
from mtjax.finetune.tasks.registry import task_of
from mtjax.finetune.tasks.task import Encoded
from mtjax.layout.mesh import parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.devices import attach_devices


@dataclass(frozen=True)
class Predictions:
    """Predictions for rows, in their order.

    Attributes:
      encoded: the encoded rows.
      labels: names of classes, if any.
      note: note on rows that were skipped.
      values: float64: probabilities of classes or choices [rows, classes], values [rows, 1], or logits of the first and
        last token of a span [rows, sequence, 2].
    """

    encoded: Encoded
    labels: tuple[str, ...] | None
    note: str
    values: np.ndarray

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """One JSON object for each row: its line in the file, and the answer."""
        return self.encoded.lines(self.values)

    @cached_property
    def scores(self) -> Scores:
        """The task's metrics; empty if the rows have no labels."""
        return self.encoded.scores(self.values)


def predict(source: str, data: Path, *, mesh: str = "1x1", rows: int = 32, dtype: str = "float32") -> Predictions:
    """Runs a finetuned model on the rows of a file.

    Args:
      source: a finetuned run (its best checkpoint), a converted folder, or hf:DIR.
      data: TSV or JSON lines with the task's fields; labels are optional.
      mesh: DATAxMODEL.
      rows: batch size per data-parallel rank.
      dtype: compute_dtype.

    Raises:
      UserError: the weights have no head for a task, or the rows can't be read.
    """
    mesh_shape = parse_mesh(mesh)
    devices = attach_devices(mesh_shape)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(mesh_shape)))
    config = saved.config
    if config.model.head == "language":
        raise UserError(f"{source} has no head for a task: finetune it first with mtjax finetune --init-from {source}")
    task = task_of(config)
    examples = task.examples(data, config, labelled=False)
    sharded_model = ShardedModel(for_rows(config, Parallel(mesh=mesh), rows, compute_dtype=dtype), devices)
    encoded = task.encoded(examples.rows, RowEncoder(saved.tokenizer()[1], config.model.family), config)
    outputs = Outputs(sharded_model).compute(
        saved.parameters(sharded_model), encoded.samples(config.model.sequence_length)
    )
    # `mean` averages probabilities, not logits, whose size differs between models.
    values = encoded.comparable(encoded.read(outputs).astype(np.float64))
    return Predictions(encoded, task.labels or config.finetuning.labels, examples.note, values)


def mean(members: Sequence[Predictions]) -> Predictions:
    """Averages the members' probabilities or values: the ensemble of the paper, there of five models.

    Raises:
      UserError: the members have different classes, or read rows of different lengths.
    """
    first = members[0]
    for other in members[1:]:
        if other.labels != first.labels:
            raise UserError(f"the models have different classes: {first.labels} and {other.labels}")
    # Windows of SQuAD depend on the length, so values of different models would be of different tokens.
    if len({member.values.shape for member in members}) > 1:
        raise UserError("the models have different sequence lengths: finetune them with the same --sequence-length")
    values = np.mean([member.values for member in members], axis=0)
    return Predictions(first.encoded, first.labels, first.note, values)
