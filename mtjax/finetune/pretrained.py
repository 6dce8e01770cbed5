"""Base class of finetuning objectives: initial weights, their tokenizer, and steps from epochs."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.horizon import Horizon, horizon_of
from mtjax.data import DataPosition, Dataset, Tokenizer, TrainingText, train_samples
from mtjax.data.samples.order import digest_of_lengths, shifted
from mtjax.data.tokens.identity import same_path
from mtjax.data.tokens.tokenizer import folder_of, open_tokenizer
from mtjax.errors import UserError
from mtjax.families.retro.config import shortest_text, text_step
from mtjax.finetune.pretrained_trunk import PretrainedTrunk
from mtjax.finetune.samples import Epochs, Grouped
from mtjax.finetune.teacher import Teacher, TeacherTargets
from mtjax.layout.divisibility import parts_of_samples
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.processes.notes import say_notes
from mtjax.runtime.train_state import State
from mtjax.train.changes import position_of
from mtjax.train.folder.tokenizer import (
    check_processes,
    check_resumed,
    files_beside,
    files_of_weights,
    owned_by_run,
    with_end,
)
from mtjax.train.objective import Objective, position_in
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep

LENGTH_STEP = 64
"""The sequence length is that of the longest row, rounded up to a multiple of this and of what the mesh divides."""


@dataclass(frozen=True)
class FinetuningTokenizer:
    """The tokenizer of a finetuning."""

    name: str
    """Its name, as in `--tokenizer`."""
    tokenizer: Tokenizer
    folder: Path
    """The folder with its chat template."""
    files: Mapping[str, bytes]
    """Files that are saved with it in the run's folder."""
    is_saved: bool = False
    """Whether the run's folder already contains it."""


class FinetuningObjective(Objective):
    """An objective that starts from pretrained weights of any format.

    Args:
      trunk: the pretrained weights; None for random initialization.
      teacher: the teacher, for distillation.
    """

    command = "mtjax finetune"

    def __init__(self, trunk: PretrainedTrunk | None, teacher: Teacher | None = None) -> None:
        self.trunk, self.teacher = trunk, teacher

    def initial_weights(self, config: Config) -> PretrainedTrunk | None:
        """Returns the pretrained weights, if any."""
        return self.trunk

    def goal(self, config: Config) -> Goal:
        """Returns the metric by which the best checkpoint is selected."""
        raise NotImplementedError

    def teacher_targets(self, program: TrainStep) -> TeacherTargets | None:
        """Loads the teacher, if any."""
        return self.teacher.load(program) if self.teacher else None

    def sample(self, program: TrainStep, state: State, tokenizer: Tokenizer) -> str:
        """Returns "": metrics are printed instead of a sample."""
        return ""

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Returns a command for a longer run from the same weights, as the learning rate of this one has decayed."""
        epochs = 2 * config.finetuning.epochs
        return [f"{self.command} --config {out}/config.toml --epochs {epochs:g} --out {out}-{epochs:g}-epochs"]

    def horizon(self, config: Config, past: Past | None) -> Horizon:
        """Returns the steps over which schedules decay: those of all epochs, also if their number was changed."""
        return horizon_of(config.optimizer, config.training.steps)

    def in_order(
        self,
        config: Config,
        samples: Grouped,
        lengths: Sequence[int],
        past: Past | None,
        allowed: Collection[str],
    ) -> tuple[Dataset, DataPosition]:
        """Returns the training rows in the order of the run, epoch by epoch, and the data position to save.

        Args:
          config: the config, with the steps of the run.
          samples: the rows.
          lengths: lengths of all rows in tokens, by which changes of the data are detected.
          past: the run that is resumed; None for a new one.
          allowed: kinds of changes that may start a new order.

        Raises:
          UserError: the data changed, so that the order of the run can't be continued.
        """
        total = train_samples(config.training, *position_in(past))
        name = config.data.train_data or config.data.data or "the training rows"
        texts = [TrainingText(name, digest_of_lengths(np.asarray(lengths)), len(samples))]
        position = position_of(past, config, texts, total, order_settings=("seed",), allowed=allowed)
        order = position.order
        return shifted(Epochs(samples, config.training.seed, order.counts[-1]), order), position

    def open_tokenizer(self, config: Config, out: Path) -> FinetuningTokenizer:
        """Opens the tokenizer: that of the resumed run, else `--tokenizer`, else that of the weights.

        Args:
          config: the config of the run.
          out: the run's folder.

        Raises:
          UserError: there is none, `--tokenizer` differs from that of the run or the weights, or processes have
            different ones.
        """
        found = self._find_tokenizer(config, out)
        found = with_end(found, config.data.eod_token, found.name)
        check_processes(found.name, found.tokenizer)
        return found

    def _find_tokenizer(self, config: Config, out: Path) -> FinetuningTokenizer:
        run_tokenizer = owned_by_run(config, out) if config.output.resume else None
        # A resumed run keeps the tokenizer that it was trained with, although that of the weights may have changed
        # since.
        if run_tokenizer is not None:
            note = check_resumed(run_tokenizer, config.data.tokenizer)
            say_notes([note] if note else [])
            name = config.data.tokenizer or run_tokenizer.shown
            return FinetuningTokenizer(name, run_tokenizer.tokenizer, run_tokenizer.folder, {}, is_saved=True)
        if self.trunk is not None:
            saved, origin = self.trunk.saved, self.trunk.saved.source.origin
            name, tokenizer = saved.tokenizer(config.data.tokenizer)
            # Merges and vocabulary files belong to their tokenizer: beside another one they would be read in its place.
            is_theirs = origin.tokenizer is not None and same_path(name, origin.tokenizer)
            files = files_of_weights(origin.files, origin.hugging_face, vocabulary=is_theirs)
            return FinetuningTokenizer(name, tokenizer, origin.files, files)
        name = config.data.tokenizer
        if name is None:
            raise UserError("--tokenizer is missing: it is required without --init-from")
        return FinetuningTokenizer(
            name, open_tokenizer(name, config.data.eod_token), folder_of(name), files_beside(name)
        )

    def with_text(self, config: Config, longest: int, name: str, tokenizer: Tokenizer) -> Config:
        """Returns the config with the tokenizer's vocabulary size and the rows' sequence length."""
        mesh = parse_mesh(config.parallel.mesh)
        # Context and sequence parallelism divide the sequence.
        step = math.lcm(
            LENGTH_STEP, parts_of_samples(Plan.of(config, mesh).layout(config.model), mesh), text_step(config.model)
        )
        longest = max(longest, shortest_text(config.model))
        return configs.replace(
            config,
            tokenizer=name,
            # That of the weights, which may be larger than the tokenizer's; else random weights get the tokenizer's.
            vocab_size=config.model.vocab_size or tokenizer.vocab_size,
            sequence_length=min(config.model.sequence_length, -(-longest // step) * step),
        )

    def with_steps(self, config: Config, count: int, folder: Path, past: Past | None = None) -> Config:
        """Returns the config with steps, warmup and intervals for `count` training rows per epoch."""
        options, size = config.finetuning, config.training.global_batch_size
        steps_per_epoch = math.ceil(count / size)
        step, consumed = position_in(past)
        # A resumed run may have consumed rows with another batch size.
        steps = step + max(0, math.ceil((options.epochs * count - consumed) / size))
        return configs.replace(
            config,
            steps=steps,
            warmup_steps=round(options.warmup_fraction * steps),
            valid_every=config.output.valid_every or steps_per_epoch,
            checkpoint_every=config.output.checkpoint_every or steps_per_epoch,
            out=folder,
        )
