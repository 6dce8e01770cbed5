"""The objective of a run: initial weights, data and validation. `Pretraining` is here; finetuning has others."""

import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from mtjax import config as configs
from mtjax import data
from mtjax.config import Config
from mtjax.config.families import is_decoder
from mtjax.config.horizon import Horizon, horizon_of
from mtjax.data import DataPosition, Dataset, Tokenizer, TrainingText
from mtjax.data.tokens.end_file import SENTENCEPIECE_FILE, TOKENIZER_JSON
from mtjax.errors import UserError
from mtjax.models.sharded_model import GlobalBatch, ShardedModel
from mtjax.runtime.checkpoints.past import Past
from mtjax.runtime.checkpoints.weights import Weights, check_same_weights, find_weights, restore_weights
from mtjax.runtime.processes.notes import say_notes
from mtjax.runtime.train_state import State
from mtjax.train.changes import check_learning_rate, neighbours_of, position_of, with_horizon
from mtjax.train.feed import next_batch, open_batches
from mtjax.train.folder.tokenizer import find_tokenizer
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep

Tree = Any
VALID_LOSS = "valid_loss"


@dataclass(frozen=True)
class RunData:
    """Tokenizer and data of a run."""

    tokenizer: Tokenizer
    train: Dataset
    held_out: Dataset | None
    """Validation data; None if there are none."""
    position: DataPosition
    """The order of the training samples, and the text they are built from."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents, by name, of the files that are saved in the run's folder with the tokenizer, such as a chat template; a
    `tokenizer.json` among them is the tokenizer itself."""
    is_saved: bool = False
    """Whether the run's folder already has the tokenizer and these files, which never change."""
    tokenizer_name: str = "the run's tokenizer"
    """What messages call the tokenizer: as the user named it, or its file."""
    read: Mapping[str, tuple[TrainingText, ...]] = field(default_factory=dict)
    """The texts or rows that were read, by what they are: they must be the same in all processes."""

    def save(self, folder: Path) -> None:
        """Writes the tokenizer and its files, unless the folder already has them."""
        if self.is_saved:
            return
        # The tokenizer is written last, so that a run that is killed in between counts as one without a tokenizer. A
        # tokenizer.model without tokenizer.json would count as the tokenizer (`tokenizer_of_run`), so it comes last.
        tokenizer_files = [name for name in (TOKENIZER_JSON, SENTENCEPIECE_FILE) if name in self.files]
        for name in self.files.keys() - set(tokenizer_files):
            self._write(name, folder)
        if TOKENIZER_JSON not in self.files:
            self.tokenizer.save(folder)
        for name in tokenizer_files:
            self._write(name, folder)

    def _write(self, name: str, folder: Path) -> None:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(self.files[name])
        # Renamed when it is complete, so that a run that is killed leaves no half of a tokenizer.
        temporary.replace(target)


TeacherTargets = Callable[[GlobalBatch], GlobalBatch]
"""Maps a batch of data to the inputs of a step (`TrainStep.abstract_step_batch`)."""


class InitialWeights(Protocol):
    """Weights with which a run starts, instead of random ones."""

    @property
    def folder(self) -> Path:
        """The folder of the weights."""
        ...

    def check(self, program: TrainStep) -> None:
        """Checks that the weights fit the program's model.

        Raises:
          UserError: lists the differences.
        """
        ...

    def read(self, program: TrainStep) -> Tree:
        """Reads the parameters in the program's sharding.

        Raises:
          UserError: they are corrupted, or can't be read.
        """
        ...


class Evaluations(Protocol):
    """Evaluation tasks (`--evaluate`) that run during training."""

    @property
    def goal(self) -> Goal | None:
        """The result that selects the best checkpoint; None if it is not one of these tasks."""
        ...

    def open(self, program: TrainStep, text: "RunData") -> None:
        """Reads the tasks' files, with the tokenizer of the run.

        Raises:
          UserError: a file is not valid for its task, or the model does not predict the next token.
        """
        ...

    def evaluate(self, parameters: Tree) -> dict[str, float]:
        """Runs the tasks; returns their metrics, each `TASK/RESULT`."""
        ...


class Objective(Protocol):
    """What a run trains the model for."""

    command: str
    """The command that starts the run: `mtjax train`."""

    def initial_weights(self, config: Config) -> InitialWeights | None:
        """Opens the weights of `init_from`; None for random weights.

        Raises:
          UserError: there are no such weights.
        """
        ...

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """Opens the run's data, and resolves the settings of the config that depend on the data and the folder.

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
        """Returns the steps over which learning rate and weight decay change.

        Raises:
          UserError: the learning rate of all remaining steps is 0.
        """
        ...

    def teacher_targets(self, program: TrainStep) -> TeacherTargets | None:
        """Returns the function that adds a teacher's targets to each batch; None without a teacher.

        Raises:
          UserError: the teacher can't be used.
        """
        ...

    def validate(self, program: TrainStep, parameters: Tree, held_out: Dataset) -> dict[str, float]:
        """Runs a validation; returns its metrics, each `valid_...`, including `valid_loss`."""
        ...

    def goal(self, config: Config) -> Goal | None:
        """Returns the metric that selects the best checkpoint; None to keep none."""
        ...

    def sample(self, program: TrainStep, state: State, tokenizer: Tokenizer) -> str:
        """Returns a sample of the trained model for the summary: indented lines, or ""."""
        ...

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Returns commands that the user may run after training; `out` is the run's folder."""
        ...


@dataclass(frozen=True)
class SavedWeights:
    """All weights of a model, saved by a run or by `mtjax convert`."""

    weights: Weights

    @property
    def folder(self) -> Path:
        """The folder of the weights."""
        return self.weights.folder

    def check(self, program: TrainStep) -> None:
        """Checks settings and shapes.

        Raises:
          UserError: lists all differences.
        """
        check_same_weights(self.weights, program.restore_target, program.config, program.layer_orders)

    def read(self, program: TrainStep) -> Tree:
        """Reads the parameters; each device reads only its shards.

        Raises:
          UserError: they are corrupted, or can't be read.
        """
        return restore_weights(self.weights, program.restore_target, program.layer_orders)


class Foreign(InitialWeights, Protocol):
    """Weights of another format."""

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer next to them, as `--tokenizer` names it."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files beside them that the run's folder keeps, by name."""
        ...


OpenForeign = Callable[[str], Foreign | None]
"""Opens what `--init-from` names; None for a folder of mtjax."""
ContinueText = Callable[[ShardedModel, Tree, Tokenizer, str], str]
"""Generates a continuation of a prompt from the parameters as they are stored; returns prompt and continuation."""


def continues_text(config: Config) -> bool:
    """Returns whether a model predicts the next token."""
    return is_decoder(config.model) and config.model.head == "language"


@dataclass(frozen=True)
class Pretraining:
    """Pretraining on text with the family's loss."""

    continue_text: ContinueText | None = None
    """Generates the sample; None shows none."""
    open_foreign: OpenForeign | None = None
    """Opens weights of other formats; None reads only mtjax's."""

    command = "mtjax train"

    def initial_weights(self, config: Config) -> InitialWeights | None:
        """Opens the weights of a run or of `mtjax convert`.

        Raises:
          UserError: there are none, or the model needs `mtjax finetune`.
        """
        if config.model.head != "language":
            raise UserError(
                f"mtjax train does not train the head {config.model.head}: use mtjax finetune, also to resume its runs"
            )
        if config.model.lora_rank:
            raise UserError(
                f"mtjax train does not train adapters (lora_rank {config.model.lora_rank}): use mtjax finetune"
            )
        if config.finetuning.teacher is not None:
            raise UserError(
                f"mtjax train has no distillation (teacher {config.finetuning.teacher}): use mtjax finetune"
            )
        init_from = config.training.init_from
        if foreign := self._foreign(config):
            return foreign
        return SavedWeights(find_weights(init_from)) if init_from else None

    def _foreign(self, config: Config) -> "Foreign | None":
        init_from = config.training.init_from
        return self.open_foreign(str(init_from)) if self.open_foreign and init_from else None

    def load_data(
        self, config: Config, folder: Path, past: Past | None = None, allowed: Collection[str] = ()
    ) -> tuple[Config, RunData]:
        """Opens the text that the config names.

        Raises:
          UserError: the data or the tokenizer can't be used, the data can't be continued, or the vocabulary is smaller
            than the tokenizer's.
        """
        init_from = config.training.init_from
        foreign = self._foreign(config)
        weights = find_weights(init_from) if init_from and foreign is None else None
        if foreign is not None and config.data.tokenizer is None and foreign.tokenizer is not None:
            config = configs.replace(config, tokenizer=foreign.tokenizer)
        found = find_tokenizer(config, folder if config.output.resume else None, weights)
        # The run's own files win over those beside the weights.
        if foreign is not None and not found.is_saved:
            found = replace(found, files={**foreign.files, **found.files})
        say_notes(found.notes)
        tokenizer = found.tokenizer
        config = resolve(config, tokenizer, folder, past)
        total = data.train_samples(config.training, *position_in(past))
        texts = data.describe_texts(config, tokenizer)
        position = position_of(past, config, texts, total, order_settings=ORDER_SETTINGS, allowed=allowed)
        train = data.open_in_order(config, position.order, tokenizer)
        position = replace(position, neighbours=neighbours_of(past, config, allowed))
        count = config.output.valid_batches * config.training.global_batch_size
        held_out, read = None, {"training text": texts}
        if config.output.valid_every:
            held_out = data.open_dataset(config, "valid", count, tokenizer)
            read["validation text"] = data.describe_texts(config, tokenizer, "valid")
        return config, RunData(tokenizer, train, held_out, position, found.files, found.is_saved, found.name, read)

    def horizon(self, config: Config, past: Past | None) -> Horizon:
        """Returns the steps over which learning rate and weight decay change; a resumed run keeps them.

        Raises:
          UserError: the learning rate of all remaining steps is 0.
        """
        horizon = horizon_of(config.optimizer, config.training.steps, past.horizon if past else None)
        if past is not None:
            check_learning_rate(past, config, with_horizon(config, horizon))
        return horizon

    def teacher_targets(self, program: TrainStep) -> TeacherTargets | None:
        """Returns None: pretraining has no teacher."""
        return None

    def validate(self, program: TrainStep, parameters: Tree, held_out: Dataset) -> dict[str, float]:
        """Computes means over the first validation batches: `valid_loss`, and each loss by name if there are
        several."""
        config = program.config
        size = config.training.global_batch_size
        totals: dict[str, tuple[Any, Any]] = {}
        # From sample 0 each time: validations of a run compare, also after a resume.
        with open_batches(program, config, held_out, 0, data.constant(size)) as batches:
            for _ in range(config.output.valid_batches):
                sums = program.evaluation(parameters, next_batch(program, batches, size))
                totals = {n: (s + totals[n][0], w + totals[n][1]) if totals else (s, w) for n, (s, w) in sums.items()}
        # Sums over all batches, divided once: a mean of the batches' means would weigh tokens of short batches more.
        means = {f"valid_{name}": float(s) / max(float(w), 1.0) for name, (s, w) in totals.items()}
        return means | {"valid_loss": sum(means.values())}

    def goal(self, config: Config) -> Goal | None:
        """Returns the validation loss if `keep_best` selects it; otherwise only the last checkpoints are kept."""
        return Goal(VALID_LOSS, higher_is_better=False) if config.output.keep_best == VALID_LOSS else None

    def sample(self, program: TrainStep, state: State, tokenizer: Tokenizer) -> str:
        """Generates a continuation of the prompt; "" for models that do not predict the next token."""
        if self.continue_text is None or not continues_text(program.config):
            return ""
        text = self.continue_text(program, state.weights, tokenizer, program.config.output.prompt)
        # A small model may produce control characters, which would act on the terminal.
        printable = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
        without_gaps = re.sub(r"\n\s*\n", "\n", printable)  # blank lines would take most of the summary
        return f"sample  {textwrap.indent(without_gaps, ' ' * 8).strip()}\n"

    def next_commands(self, config: Config, out: str) -> list[str]:
        """Returns the commands to train longer and to inspect the step."""
        file, training, optimizer = f"{out}/config.toml", config.training, config.optimizer
        longer = f"--steps {2 * training.steps}"
        if training.train_samples is not None:
            longer = f"--train-samples {2 * training.train_samples}"
        if optimizer.min_learning_rate == 0 and optimizer.decay_style != "constant":  # it has decayed to 0
            longer += f" --min-learning-rate {optimizer.learning_rate / 10:g}"
        return [f"{self.command} --config {file} --resume {longer}", f"mtjax inspect --config {file}"]


PRETRAINING = Pretraining()


ORDER_SETTINGS = ("seed", "sequence_length", "add_extra_token_to_sequence")
"""Settings on which the order of pretraining samples depends, in addition to the text."""


def position_in(past: Past | None) -> tuple[int, int]:
    """Returns the steps that a run has done, and the samples consumed."""
    return (0, 0) if past is None else (past.step, past.consumed_samples)


def resolve(config: Config, tokenizer: Tokenizer, folder: Path, past: Past | None = None) -> Config:
    """Fills in the settings that depend on the tokenizer, the folder and the steps done so far.

    Raises:
      UserError: the vocabulary is smaller than the tokenizer's.
    """
    needed = data.vocabulary_size(config, tokenizer)
    size = config.model.vocab_size or needed
    if size < needed:
        raise UserError(f"vocab_size {size} is below the {needed} tokens of the tokenizer; raise it, or remove it")
    # From the samples that are left: batches before this start may have had other sizes.
    steps = data.train_steps(config.training, *position_in(past))
    return configs.replace(config, vocab_size=size, steps=steps, out=folder)
