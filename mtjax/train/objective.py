"""What a run learns: what it begins with, what it reads, how it is judged. Pretraining is one, finetuning others."""

import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtjax import config as configs
from mtjax import data
from mtjax.config import Config
from mtjax.data import DataPosition, Dataset, Tokenizer
from mtjax.data.progress import say
from mtjax.data.tokens.tokenizer import SENTENCEPIECE_FILE, TOKENIZER_JSON
from mtjax.errors import UserError
from mtjax.models.sharded_model import Batch, ShardedModel
from mtjax.train.changes import check_learns, position_of, scheduled
from mtjax.train.checkpoints.past import Past
from mtjax.train.checkpoints.weights import Weights, check_same_weights, find_weights, restore_weights
from mtjax.train.feed import next_batch, open_batches
from mtjax.train.folder.tokenizer import find_tokenizer
from mtjax.train.observability.best import Goal
from mtjax.train.processes.coordination import this_process
from mtjax.train.schedule import Horizon, horizon_of
from mtjax.train.step import TrainStep

Tree = Any
VALID_LOSS = "valid_loss"


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    tokenizer: Tokenizer
    train: Dataset
    held_out: Dataset | None
    """What validation reads; None when there is none."""
    position: DataPosition
    """The order of the training samples, and the text they are made from."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents, by name, of the files that the run's folder keeps with the tokenizer, such as its chat template; a
    `tokenizer.json` among them is the tokenizer itself."""
    is_kept: bool = False
    """Whether the run's folder has the tokenizer and these files already: they never change."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer, and what goes with it, unless the folder has its own."""
        if self.is_kept:
            return
        # The tokenizer last: a run that was killed between the files is taken for one without a tokenizer. A
        # tokenizer.model without tokenizer.json would be taken for the tokenizer (`tokenizer_of_run`): it comes last.
        own = [name for name in (TOKENIZER_JSON, SENTENCEPIECE_FILE) if name in self.files]
        for name in self.files.keys() - set(own):
            self._write(name, folder)
        if TOKENIZER_JSON not in self.files:
            self.tokenizer.save(folder)
        for name in own:
            self._write(name, folder)

    def _write(self, name: str, folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(self.files[name])
        temporary.replace(target)


TeacherTargets = Callable[[Batch], Batch]
"""From a batch of the data to what a step reads (`Program.abstract_step_batch`)."""


class InitialWeights(Protocol):
    """What a run begins with, instead of random numbers."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        ...

    def check(self, program: TrainStep) -> None:
        """Checks that it is of the program's model.

        Raises:
          UserError: lists how it differs.
        """
        ...

    def read(self, program: TrainStep) -> Tree:
        """The parameters, placed as the program keeps them.

        Raises:
          UserError: they are damaged, or can't be read.
        """
        ...


class Evaluations(Protocol):
    """What `--evaluate` asks of the model while it learns."""

    @property
    def goal(self) -> Goal | None:
        """By which result the best checkpoint is chosen; None where that is by none of these."""
        ...

    def open(self, program: TrainStep, text: "RunData") -> None:
        """Reads the tasks' files, with the tokenizer of the run's text.

        Raises:
          UserError: one is not its task's, or the model does not predict the next token.
        """
        ...

    def evaluate(self, parameters: Tree) -> dict[str, float]:
        """The entries of the metrics that the tasks give, each `TASK/RESULT`."""
        ...


class Objective(Protocol):
    """What a run learns."""

    command: str
    """What the user types to start it: `mtjax train`."""

    def initial_weights(self, config: Config) -> InitialWeights | None:
        """What `init_from` names; None for random weights.

        Raises:
          UserError: there are no such weights.
        """
        ...

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """What the run reads, and the config with everything that this and the folder decide filled in.

        Args:
          config: of the run.
          folder: of the run.
          past: the run that is resumed; None for a new one.
          allowed: kinds of changes that may begin a new order of samples (`changes.KINDS`).

        Raises:
          UserError: the data can't be used, or can't be continued.
        """
        ...

    def horizon(self, config: Config, past: Past | None) -> Horizon:
        """Returns the steps over which the rates of a run change.

        Raises:
          UserError: the resumed run would learn nothing.
        """
        ...

    def teacher_targets(self, program: TrainStep) -> TeacherTargets | None:
        """What a teacher adds to each batch of the data before its step; None without a teacher.

        Raises:
          UserError: the teacher can't be used.
        """
        ...

    def validate(self, program: TrainStep, parameters: Tree, held_out: Dataset) -> dict[str, float]:
        """The entries of the metrics that a validation gives, each `valid_...`; `valid_loss` among them."""
        ...

    def goal(self, config: Config) -> Goal | None:
        """By what the best checkpoint is chosen; None keeps none."""
        ...

    def sample(self, program: TrainStep, parameters: Tree, tokenizer: Tokenizer) -> str:
        """What the summary shows of the trained model, indented lines or nothing."""
        ...

    def next_commands(self, config: Config, out: str) -> list[str]:
        """What the user may type when the run is done; `out` is its folder."""
        ...


@dataclass(frozen=True)
class SavedWeights:
    """All weights of a model, of a run or as `mtjax convert` wrote them."""

    weights: Weights

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.weights.folder

    def check(self, program: TrainStep) -> None:
        """Checks settings and shapes.

        Raises:
          UserError: lists all differences.
        """
        check_same_weights(self.weights, program.abstract_parameters, program.config, program.layer_orders)

    def read(self, program: TrainStep) -> Tree:
        """The parameters, each device's part read on its own.

        Raises:
          UserError: they are damaged, or can't be read.
        """
        return restore_weights(self.weights, program.restore_target, program.layer_orders)


ContinueText = Callable[[ShardedModel, Tree, Tokenizer, str], str]
"""A prompt and what the model writes after it, from its parameters as they are stored."""


def continues_text(config: Config) -> bool:
    """Whether a model predicts the next token."""
    return config.model.family in ("gpt", "llama") and config.model.head == "language"


@dataclass(frozen=True)
class Pretraining:
    """The family's own objective, on text."""

    continue_text: ContinueText | None = None
    """What writes the sample; None shows none."""

    command = "mtjax train"

    def initial_weights(self, config: Config) -> InitialWeights | None:
        """A run's or converted weights.

        Raises:
          UserError: there are none, or the model's head is not of language.
        """
        if config.model.head != "language":
            raise UserError(
                f"a head for {config.model.head} is not trained on text: mtjax finetune trains it and resumes its runs"
            )
        if config.model.lora_rank:
            raise UserError(f"lora_rank {config.model.lora_rank}: adapters are trained by mtjax finetune, on its tasks")
        if config.finetuning.teacher is not None:
            raise UserError("a teacher's student is trained by mtjax finetune, on its tasks")
        init_from = config.training.init_from
        return SavedWeights(find_weights(init_from)) if init_from else None

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """The text that a config names.

        Raises:
          UserError: the data or the tokenizer can't be used, the data can't be continued, or the vocabulary is smaller
            than the tokenizer's.
        """
        init_from = config.training.init_from
        weights = find_weights(init_from) if init_from else None
        found = find_tokenizer(config, folder if config.output.resume else None, weights)
        say_notes(found.notes)
        tokenizer = found.tokenizer
        config = resolve(config, tokenizer, folder, past)
        total = data.train_samples(config.training, *position_in(past))
        texts = data.describe_texts(config, tokenizer)
        position = position_of(past, config, texts, total, order_settings=ORDER_SETTINGS, allowed=allowed)
        train = data.open_in_order(config, position.order, tokenizer)
        count = config.output.valid_batches * config.training.global_batch_size
        held_out = data.open_dataset(config, "valid", count, tokenizer) if config.output.valid_every else None
        return config, RunData(tokenizer, train, held_out, position, found.files, found.is_kept)

    def horizon(self, config: Config, past: Past | None) -> Horizon:
        """Returns the steps over which the rates of a run change, which a resumed run keeps.

        Raises:
          UserError: the learning rate of all steps left is 0.
        """
        horizon = horizon_of(config.optimizer, config.training.steps, past.horizon if past else None)
        if past is not None:
            check_learns(past, config, scheduled(config, horizon))
        return horizon

    def teacher_targets(self, program: TrainStep) -> TeacherTargets | None:
        """None: text is learnt without a teacher."""
        return None

    def validate(self, program: TrainStep, parameters: Tree, held_out: Dataset) -> dict[str, float]:
        """Means over the first batches: `valid_loss`, and each loss where the family has several."""
        config = program.config
        size = config.training.global_batch_size
        totals: dict[str, tuple[Any, Any]] = {}
        with open_batches(program, config, held_out, 0, data.constant(size)) as batches:
            for _ in range(config.output.valid_batches):
                sums = program.evaluate(parameters, next_batch(program, batches, size))
                totals = {n: (s + totals[n][0], w + totals[n][1]) if totals else (s, w) for n, (s, w) in sums.items()}
        means = {f"valid_{name}": float(s) / max(float(w), 1.0) for name, (s, w) in totals.items()}
        return means | {"valid_loss": sum(means.values())}

    def goal(self, config: Config) -> Goal | None:
        """The loss of held-out text, where `keep_best` says so; else the last checkpoint is the one to use."""
        return Goal(VALID_LOSS, higher_is_better=False) if config.output.keep_best == VALID_LOSS else None

    def sample(self, program: TrainStep, parameters: Tree, tokenizer: Tokenizer) -> str:
        """A continuation of the prompt; nothing for models that don't continue text."""
        if self.continue_text is None or not continues_text(program.config):
            return ""
        text = self.continue_text(program, parameters, tokenizer, program.config.output.prompt)
        printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
        return f"sample  {textwrap.indent(printable, ' ' * 8).strip()}\n"

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Train on, or look at the step."""
        file, training, optimizer = f"{out}/config.toml", config.training, config.optimizer
        longer = f"--steps {2 * training.steps}"
        if training.train_samples is not None:
            longer = f"--train-samples {2 * training.train_samples}"
        if optimizer.min_learning_rate == 0 and optimizer.decay_style != "constant":  # has decayed to nothing
            longer += f" --min-learning-rate {optimizer.learning_rate / 10:g}"
        return [f"{self.command} --config {file} --resume {longer}", f"mtjax inspect --config {file}"]


PRETRAINING = Pretraining()


ORDER_SETTINGS = ("seed", "sequence_length", "add_extra_token_to_sequence")
"""Settings on which the order of the samples of pretraining depends, in addition to the text."""


def say_notes(notes: Iterable[str]) -> None:
    """Prints notes for the user, in the first process only."""
    if this_process():
        return
    for note in notes:
        say(f"note    {note}")


def position_in(past: Past | None) -> tuple[int, int]:
    """Steps that a run has done, and samples that these have consumed."""
    return (0, 0) if past is None else (past.step, past.consumed_samples)


def resolve(config: Config, tokenizer: Tokenizer, folder: Path, past: Past | None = None) -> Config:
    """The config with everything that the text, the machine and what was done so far decide filled in.

    Raises:
      UserError: the vocabulary is smaller than the tokenizer's.
    """
    needed = data.vocabulary_size(config, tokenizer)
    size = config.model.vocab_size or needed
    if size < needed:
        raise UserError(f"vocab_size {size} is below the {needed} tokens of the tokenizer; raise it, or leave it out")
    steps = data.train_steps(config.training, *position_in(past))
    return configs.replace(config, vocab_size=size, steps=steps, out=folder)
