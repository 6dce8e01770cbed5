"""A task as an objective of the trainer: its rows, its steps, its validation."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import Dataset, Tokenizer
from mtjax.data.progress import say
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.files import TaskRows, read_task
from mtjax.finetune.initial import PretrainedTrunk
from mtjax.finetune.labels import classes_of, label_numbers, weights_of
from mtjax.finetune.metrics import mean_loss
from mtjax.finetune.outputs import Outputs
from mtjax.finetune.rows import Example
from mtjax.finetune.samples import Encoder, Epochs, Ids, Samples
from mtjax.finetune.tasks.task import HeldOut, Task
from mtjax.train.objective import Objective, Text
from mtjax.train.processes.exchange import this_process
from mtjax.train.step import Program
from mtjax.train.watch.best import Goal

LENGTH_STEP = 64
"""Sequences are as long as the longest row, rounded up to a multiple of this."""


class FineTuning(Objective):
    """A task, learnt by a head on pretrained weights.

    Args:
      task: what is learnt.
      trunk: the weights; None for random ones.
    """

    command = "mtjax finetune"

    def __init__(self, task: Task, trunk: PretrainedTrunk | None) -> None:
        self.task, self.trunk = task, trunk
        self._outputs: Outputs | None = None
        self._held_out: list[tuple[HeldOut, Samples]] = []

    def initial_weights(self, config: Config) -> PretrainedTrunk | None:
        """Those that were given."""
        return self.trunk

    def open_text(self, config: Config, folder: Path) -> tuple[Config, Text]:
        """The task's rows, and the config with steps, lengths and labels filled in.

        Raises:
          UserError: rows, labels or tokenizer can't be used.
        """
        if config.optimizer.label_smoothing or config.optimizer.z_loss:
            raise UserError(
                "label_smoothing and z_loss are of losses over a vocabulary: leave them out of a finetuning"
            )
        name, tokenizer = self._tokenizer(config)
        rows = read_task(config, self.task)
        if self.task.head == "classification":
            labels = self.task.labels or config.finetuning.labels or classes_of(rows.train)
            config = configs.replace(config, labels=labels, num_labels=len(labels))
        encoder = Encoder(tokenizer, config.model.family)
        train, held_out = self._numbered(config, rows)
        ids = [encoder.ids(examples) for examples, _ in (train, *(pair for _, pair in held_out))]
        longest = max(encoder.length(row) for part in ids for row in part)
        config = self._resolved(config, longest, len(train[0]), folder, name, tokenizer)
        self._warn(rows.notes, longest, config, ids, encoder)
        make = SampleMaker(config, encoder)
        weights = weights_of(config, train[1])
        training = make(ids[0], train[1], weights)
        self._held_out = [(s, make(i, numbers)) for (s, (_, numbers)), i in zip(held_out, ids[1:], strict=True)]
        count = config.training.steps * config.training.global_batch_size
        return config, Text(tokenizer, Epochs(training, config.training.seed, count), self._held_out[0][1])

    def validate(self, program: Program, parameters: Any, held_out: Dataset) -> dict[str, float]:
        """The task's metrics on all rows held out, and the mean loss."""
        self._outputs = self._outputs or Outputs(program)
        entries: dict[str, float] = {}
        for held, samples in self._held_out:
            outputs = self._outputs.of(parameters, samples)
            scores = {"loss": mean_loss(outputs, samples.labels), **self.task.metrics(outputs, samples.labels)}
            entries |= {f"valid_{name}{held.suffix}": value for name, value in scores.items()}
        return entries

    def goal(self, config: Config) -> Goal:
        """The task's metric."""
        return Goal(f"valid_{self.task.goal}", patience=config.finetuning.patience)

    def sample(self, program: Program, parameters: Any, tokenizer: Tokenizer) -> str:
        """Nothing: the metrics say it."""
        return ""

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Longer, from where it is."""
        return [f"{self.command} --config {out}/config.toml --resume --epochs {2 * config.finetuning.epochs:g}"]

    def _tokenizer(self, config: Config) -> tuple[str, Tokenizer]:
        if self.trunk is not None:
            return self.trunk.saved.tokenizer(config.data.tokenizer)
        if config.data.tokenizer is None:
            raise UserError("--tokenizer is missing, and there are no weights that came with one")
        return config.data.tokenizer, open_tokenizer(config.data.tokenizer)

    def _numbered(
        self, config: Config, rows: TaskRows
    ) -> tuple[tuple[list[Example], np.ndarray], list[tuple[HeldOut, tuple[list[Example], np.ndarray]]]]:
        """Examples with their labels as numbers; those whose label is none are left out, and noted."""
        labels = config.finetuning.labels if self.task.head == "classification" else None

        def number(examples: list[Example], which: str) -> tuple[list[Example], np.ndarray]:
            good, numbers, note = label_numbers(examples, labels, which)
            if note:
                rows.notes.append(note)
            return good, numbers

        train = number(rows.train, "training")
        return train, [(s, number(examples, f"validation{s.suffix}")) for s, examples in rows.held_out]

    def _resolved(
        self, config: Config, longest: int, count: int, folder: Path, name: str, tokenizer: Tokenizer
    ) -> Config:
        """The config with everything that rows and tokenizer decide."""
        options, size = config.finetuning, config.training.global_batch_size
        an_epoch = math.ceil(count / size)
        steps = math.ceil(options.epochs * count / size)
        return configs.replace(
            config,
            tokenizer=name,
            vocab_size=config.model.vocab_size or tokenizer.vocab_size,
            sequence_length=min(config.model.sequence_length, -(-longest // LENGTH_STEP) * LENGTH_STEP),
            steps=steps,
            warmup_steps=round(options.warmup_fraction * steps),
            valid_every=config.output.valid_every or an_epoch,
            checkpoint_every=config.output.checkpoint_every or an_epoch,
            out=folder,
        )

    def _warn(self, notes: list[str], longest: int, config: Config, ids: Sequence[list[Ids]], encoder: Encoder) -> None:
        if this_process():
            return
        length = config.model.sequence_length
        if longest > length:
            cut = sum(encoder.length(row) > length for part in ids for row in part)
            notes.append(f"{cut:,} of {sum(map(len, ids)):,} rows are longer than {length} tokens, and are cut")
        for note in notes:
            say(f"note    {note}")


class SampleMaker:
    """Samples of one length from tokens and labels."""

    def __init__(self, config: Config, encoder: Encoder) -> None:
        self.length, self.encoder = config.model.sequence_length, encoder

    def __call__(self, ids: list[Ids], labels: np.ndarray, weights: np.ndarray | None = None) -> Samples:
        """Samples, which weigh 1 each where no weights are given."""
        rows = [self.encoder.row(row, self.length) for row in ids]
        weights = np.ones(len(ids), np.float32) if weights is None else weights
        return Samples(rows, labels, weights, self.length, self.encoder.pad)
