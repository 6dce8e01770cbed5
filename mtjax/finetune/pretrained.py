"""What every finetuning has in common: weights to begin with, their tokenizer, and steps that follow from passes."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import DataPosition, Dataset, Tokenizer, TrainingText, train_samples
from mtjax.data.samples.order import digest_of_lengths, shifted
from mtjax.data.tokens.identity import same_path
from mtjax.data.tokens.tokenizer import folder_of, open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.initial import PretrainedTrunk
from mtjax.finetune.samples import Epochs, Grouped
from mtjax.finetune.teacher import Lessons, Teacher
from mtjax.theory.divisibility import parts_of_samples
from mtjax.theory.mesh import parse_mesh
from mtjax.theory.plan import Plan
from mtjax.train.changes import position_of
from mtjax.train.checkpoints.past import Past
from mtjax.train.folder.tokenizer import check_resumed, files_beside, files_of_weights, owned_by_run, with_end
from mtjax.train.objective import Objective, position_in, say_notes
from mtjax.train.observability.best import Goal
from mtjax.train.schedule import Horizon, horizon_of
from mtjax.train.step import TrainStep

LENGTH_STEP = 64
"""Sequences are as long as the longest row, rounded up to a multiple of this, and of what the mesh divides."""


@dataclass(frozen=True)
class FinetuningTokenizer:
    """The tokenizer of a finetuning."""

    name: str
    """As `--tokenizer` names it."""
    tokenizer: Tokenizer
    folder: Path
    """Where its chat template is."""
    files: Mapping[str, bytes]
    """What the run's folder keeps with it."""
    is_kept: bool = False
    """Whether the run's folder has all of it already."""


class OnPretrained(Objective):
    """An objective that begins with weights of any format.

    Args:
      trunk: the weights; None for random ones.
      teacher: a model to learn from, besides the data.
    """

    command = "mtjax finetune"

    def __init__(self, trunk: PretrainedTrunk | None, teacher: Teacher | None = None) -> None:
        self.trunk, self.teacher = trunk, teacher

    def initial_weights(self, config: Config) -> PretrainedTrunk | None:
        """Those that were given."""
        return self.trunk

    def goal(self, config: Config) -> Goal:
        """By what the best checkpoint is chosen: each finetuning says it."""
        raise NotImplementedError

    def teacher_targets(self, program: TrainStep) -> Lessons | None:
        """Those of the teacher."""
        return self.teacher.on(program) if self.teacher else None

    def sample(self, program: TrainStep, parameters: Any, tokenizer: Tokenizer) -> str:
        """Nothing: the metrics say it."""
        return ""

    def next_commands(self, config: Config, out: str) -> list[str]:
        """A longer run from the same weights: the learning rate of this one has decayed to its end."""
        epochs = 2 * config.finetuning.epochs
        return [f"{self.command} --config {out}/config.toml --epochs {epochs:g} --out {out}-{epochs:g}-epochs"]

    def horizon(self, config: Config, past: Past | None) -> Horizon:
        """Returns the steps of the run: its rates change over its epochs, even if these were changed."""
        return horizon_of(config.optimizer, config.training.steps)

    def in_order(
        self,
        config: Config,
        samples: Grouped,
        lengths: Sequence[int],
        past: Past | None,
        allowed: Collection[str],
    ) -> tuple[Dataset, DataPosition]:
        """The training rows pass by pass, numbered as the run consumes them, and what they are made from.

        Args:
          config: with the steps of the run.
          samples: the rows.
          lengths: of all rows in tokens: rows that were added, removed or changed are noticed by them.
          past: the run that is resumed; None for a new one.
          allowed: kinds of changes that may begin a new order.

        Raises:
          UserError: the order of the run can't be continued.
        """
        total = train_samples(config.training, *position_in(past))
        name = config.data.train_data or config.data.data or "the training rows"
        texts = [TrainingText(name, digest_of_lengths(np.asarray(lengths)), len(samples))]
        position = position_of(past, config, texts, total, order_settings=("seed",), allowed=allowed)
        order = position.order
        return shifted(Epochs(samples, config.training.seed, order.counts[-1]), order), position

    def open_tokenizer(self, config: Config, out: Path) -> FinetuningTokenizer:
        """The tokenizer: of a resumed run its own, else the one that is named, else the weights'.

        Args:
          config: the run.
          out: its folder.

        Raises:
          UserError: there is none, or the one that is named differs from the run's or the weights'.
        """
        found = self._find_tokenizer(config, out)
        return with_end(found, config.data.eod_token, found.name)

    def _find_tokenizer(self, config: Config, out: Path) -> FinetuningTokenizer:
        own = owned_by_run(config, out) if config.output.resume else None
        if own is not None:
            note = check_resumed(own, config.data.tokenizer)
            say_notes([note] if note else [])
            name = config.data.tokenizer or own.shown
            return FinetuningTokenizer(name, own.tokenizer, own.folder, {}, is_kept=True)
        if self.trunk is not None:
            saved, origin = self.trunk.saved, self.trunk.saved.source.origin
            name, tokenizer = saved.tokenizer(config.data.tokenizer)
            is_theirs = origin.tokenizer is not None and same_path(name, origin.tokenizer)
            files = files_of_weights(origin.files, origin.hugging_face, vocabulary=is_theirs)
            return FinetuningTokenizer(name, tokenizer, origin.files, files)
        name = config.data.tokenizer
        if name is None:
            raise UserError("--tokenizer is missing, and there are no weights that came with one")
        return FinetuningTokenizer(
            name, open_tokenizer(name, config.data.eod_token), folder_of(name), files_beside(name)
        )

    def with_text(self, config: Config, longest: int, name: str, tokenizer: Tokenizer) -> Config:
        """The config with what tokenizer and rows decide of the model."""
        mesh = parse_mesh(config.parallel.mesh)
        step = math.lcm(LENGTH_STEP, parts_of_samples(Plan.of(config, mesh).layout(config.model), mesh))
        return configs.replace(
            config,
            tokenizer=name,
            vocab_size=config.model.vocab_size or tokenizer.vocab_size,
            sequence_length=min(config.model.sequence_length, -(-longest // step) * step),
        )

    def with_steps(self, config: Config, count: int, folder: Path, past: Past | None = None) -> Config:
        """The config with what the number of training rows decides, and the rows that the run has read so far."""
        options, size = config.finetuning, config.training.global_batch_size
        an_epoch = math.ceil(count / size)
        step, consumed = position_in(past)
        steps = step + max(0, math.ceil((options.epochs * count - consumed) / size))
        return configs.replace(
            config,
            steps=steps,
            warmup_steps=round(options.warmup_fraction * steps),
            valid_every=config.output.valid_every or an_epoch,
            checkpoint_every=config.output.checkpoint_every or an_epoch,
            out=folder,
        )
