"""Finetuning for a task as an objective of the trainer: rows, steps and validation."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import Dataset
from mtjax.errors import UserError
from mtjax.finetune.files import read_task
from mtjax.finetune.labels import weights_of
from mtjax.finetune.outputs import Outputs
from mtjax.finetune.pretrained import FinetuningObjective
from mtjax.finetune.pretrained_trunk import PretrainedTrunk
from mtjax.finetune.rows_read import rows_read
from mtjax.finetune.samples import RowEncoder, Samples
from mtjax.finetune.tasks.task import Encoded, Task
from mtjax.finetune.teacher import Teacher
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.processes.notes import say_notes
from mtjax.train.objective import RunData
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep


class TaskFinetuning(FinetuningObjective):
    """Finetuning of pretrained weights, with a head, for a task.

    Args:
      task: the task.
      trunk: the pretrained weights; None for random initialization.
      teacher: the teacher, for distillation.
    """

    def __init__(self, task: Task, trunk: PretrainedTrunk | None, teacher: Teacher | None = None) -> None:
        super().__init__(trunk, teacher)
        self.task = task
        self._outputs: Outputs | None = None
        self._held_out: list[tuple[str, Encoded, Samples]] = []

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """Reads the task's rows, and fills steps, sequence length and labels into the config.

        Raises:
          UserError: rows, labels or tokenizer are invalid.
        """
        if config.optimizer.label_smoothing or config.optimizer.z_loss:
            raise UserError("--label-smoothing and --z-loss apply only to losses over the vocabulary: remove them")
        found = self.open_tokenizer(config, folder)
        tokenizer = found.tokenizer
        rows = read_task(config, self.task)
        # Labels are those of the training rows: a class that only validation rows have can't be learned, and these rows
        # are skipped.
        if labels := self.task.labels_of(config, rows.train):
            config = configs.replace(config, labels=labels, num_labels=len(labels))
        encoder = RowEncoder(tokenizer, config.model.family)
        sets = [(rows.train, "training"), *((e, f"validation{s.suffix}") for s, e in rows.held_out)]
        encoded = [self.task.encoded(examples, encoder, config, which) for examples, which in sets]
        # The sequence length follows from the longest row of all sets, before samples are built.
        config = self.with_text(config, max(max(e.lengths) for e in encoded), found.name, tokenizer)
        # Once labels and lengths are known, which must be the teacher's.
        config = self.teacher.checked(config, tokenizer) if self.teacher else config
        training, *validation = [e.samples(config.model.sequence_length) for e in encoded]
        # Validation rows keep weight 1: metrics and losses of runs with different weights can be compared.
        training = dataclasses.replace(training, weights=weights_of(config, training.labels))
        config = self.with_steps(config, len(training), folder, past)
        self._print_notes([*rows.notes, *(e.note for e in encoded if e.note)], config, encoded)
        suffixes = [s.suffix for s, _ in rows.held_out]
        self._held_out = list(zip(suffixes, encoded[1:], validation, strict=True))
        train, position = self.in_order(config, training, encoded[0].lengths, past, allowed)
        read = rows_read(config, rows.train, *(examples for _, examples in rows.held_out))
        return config, RunData(tokenizer, train, validation[0], position, found.files, found.is_saved, found.name, read)

    def validate(self, program: TrainStep, parameters: Any, held_out: Dataset) -> dict[str, float]:
        """Returns the task's metrics and the mean loss on all validation rows."""
        # Built once for all validations, as it has the compiled program.
        self._outputs = self._outputs or Outputs(program)
        entries: dict[str, float] = {}
        for suffix, encoded, samples in self._held_out:
            values = encoded.read(self._outputs.compute(parameters, samples))
            scores = {"loss": encoded.loss(values), **encoded.scores(values)}
            entries |= {f"valid_{name}{suffix}": value for name, value in scores.items()}
        return entries

    def goal(self, config: Config) -> Goal:
        """Returns the task's metric."""
        return Goal(f"valid_{self.task.goal}", patience=config.finetuning.patience)

    def _print_notes(self, notes: list[str], config: Config, sets: Sequence[Encoded]) -> None:
        """Prints notes, including one on rows that are truncated."""
        length = config.model.sequence_length
        lengths = [row for encoded in sets for row in encoded.lengths]
        if cut := sum(row > length for row in lengths):
            notes.append(f"{cut:,} of {len(lengths):,} rows are longer than {length} tokens: {self.task.when_long}")
        say_notes(notes)
