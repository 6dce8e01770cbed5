"""What every finetuning has in common: weights to begin with, their tokenizer, and steps that follow from passes."""

import math
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import Tokenizer
from mtjax.data.tokens.tokenizer import open_tokenizer
from mtjax.errors import UserError
from mtjax.finetune.initial import PretrainedTrunk
from mtjax.finetune.teacher import Lessons, Teacher
from mtjax.theory.divisibility import parts_of_samples
from mtjax.theory.mesh import parse_mesh
from mtjax.theory.plans import Plan
from mtjax.train.objective import Objective
from mtjax.train.step import Program
from mtjax.train.watch.best import Goal

LENGTH_STEP = 64
"""Sequences are as long as the longest row, rounded up to a multiple of this, and of what the mesh divides."""


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

    def lessons(self, program: Program) -> Lessons | None:
        """Those of the teacher."""
        return self.teacher.on(program) if self.teacher else None

    def sample(self, program: Program, parameters: Any, tokenizer: Tokenizer) -> str:
        """Nothing: the metrics say it."""
        return ""

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Longer, from where it is."""
        return [f"{self.command} --config {out}/config.toml --resume --epochs {2 * config.finetuning.epochs:g}"]

    def open_tokenizer(self, config: Config) -> tuple[str, Tokenizer]:
        """The tokenizer, and what it is called: the weights' own, or the one that is named.

        Raises:
          UserError: there is none.
        """
        if self.trunk is not None:
            return self.trunk.saved.tokenizer(config.data.tokenizer)
        if config.data.tokenizer is None:
            raise UserError("--tokenizer is missing, and there are no weights that came with one")
        return config.data.tokenizer, open_tokenizer(config.data.tokenizer)

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

    def with_steps(self, config: Config, count: int, folder: Path) -> Config:
        """The config with what the number of training rows decides."""
        options, size = config.finetuning, config.training.global_batch_size
        an_epoch = math.ceil(count / size)
        steps = math.ceil(options.epochs * count / size)
        return configs.replace(
            config,
            steps=steps,
            warmup_steps=round(options.warmup_fraction * steps),
            valid_every=config.output.valid_every or an_epoch,
            checkpoint_every=config.output.checkpoint_every or an_epoch,
            out=folder,
        )
