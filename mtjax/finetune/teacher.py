"""The teacher of a distillation: a model of the same vocabulary and task, on the student's mesh, that never changes."""

import dataclasses
from functools import cached_property
from typing import Any, cast

import jax
from jax import Array
from jax.sharding import reshard

from mtjax import config as configs
from mtjax.config import Config, Model
from mtjax.convert.saved_model import NO_HINTS, Hints, SavedModel, model_of, without_training
from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.models.families.finetuned import GivesOutputs
from mtjax.models.families.gpt import GPT
from mtjax.models.sharded_model import Batch, ShardedModel, Tree
from mtjax.models.trunk import TEACHER, TEACHER_TABLE, HiddenStates
from mtjax.sharding.axes import spec, use_rules
from mtjax.theory.divisibility import num_microbatches
from mtjax.theory.layout import gathers_in_compute_dtype
from mtjax.train.step import TrainStep

DECODERS = ("gpt", "llama")


class Teacher:
    """Weights that know what a student learns.

    Args:
      name: as `--teacher` names them.
      hints: how a vocabulary is padded for the mesh.
    """

    def __init__(self, name: str, hints: Hints) -> None:
        self.name, self.hints = name, hints

    @cached_property
    def saved(self) -> SavedModel:
        """The weights.

        Raises:
          UserError: there are none.
        """
        return SavedModel.open(self.name, self.hints, "--teacher")

    def checked(self, config: Config, tokenizer: Tokenizer) -> Config:
        """The student's config, with what it must know of the teacher.

        Raises:
          UserError: it can't learn from this teacher.
        """
        self._check_models(self.saved.config.model, config)
        if lacking := sorted(name for name in self.saved.source.origin.fresh if name.startswith("head.")):
            self._refuse(f"has no {', '.join(lacking)}: finetune it on the same task first")
        self._check_labels(config)
        self._check_tokens(tokenizer)
        return _with_width(config, self.saved.config.model)

    def described(self, config: Config) -> tuple[Config, Model]:
        """The same, and the teacher's model as it reads the student's batches, for those who plan without weights.

        Raises:
          UserError: there are no such weights, or the student can't learn from them.
        """
        self._check_models(self.model, config)
        return _with_width(config, self.model), self.beside(config)

    def beside(self, config: Config) -> Model:
        """The teacher's model as it reads the batches of this student."""
        sizes = {"sequence_length": config.model.sequence_length, "vocab_multiple": config.model.vocab_multiple}
        return dataclasses.replace(self.model, **sizes)

    @cached_property
    def model(self) -> Model:
        """What the weights say of themselves.

        Raises:
          UserError: there are none.
        """
        return model_of(self.name, "--teacher", self.hints)

    def _check_models(self, theirs: Model, config: Config) -> None:
        ours = config.model
        if config.optimizer.label_smoothing or config.optimizer.z_loss:
            raise UserError("label_smoothing and z_loss cannot be combined with --teacher: remove them")
        if ours.head == "regression":
            raise UserError(
                "--teacher cannot be combined with --task regress, which has no probabilities: remove --teacher"
            )
        if theirs.family != ours.family and {theirs.family, ours.family} - set(DECODERS):
            self._refuse(
                f"is a {theirs.family}, and the student a {ours.family}: both must be decoders (gpt, llama), or of the "
                "same family"
            )
        if theirs.head != ours.head:
            done = {"language": "predicts tokens"}.get(theirs.head, f"has a head for {theirs.head}")
            wanted = "the next token" if ours.head == "language" else config.finetuning.task
            self._refuse(f"{done}, and the student learns {wanted}: finetune it on the same task first")
        if theirs.vocab_size != ours.vocab_size:
            self._refuse(
                f"has a vocabulary of {theirs.vocab_size}, and the student's has {ours.vocab_size}: they must be one"
            )
        if theirs.position == "learned" and theirs.sequence_length < ours.sequence_length:
            self._refuse(
                f"reads at most {theirs.sequence_length} tokens, and rows have {ours.sequence_length}: lower "
                "--sequence-length"
            )

    def _check_labels(self, config: Config) -> None:
        theirs, ours = self.saved.config, config
        if theirs.model.head not in ("classification", "choices"):
            return
        names, own = theirs.finetuning.labels, ours.finetuning.labels
        if theirs.model.num_labels != ours.model.num_labels:
            self._refuse(f"has {theirs.model.num_labels} labels, and the student has {ours.model.num_labels}")
        if names and own and names != own:
            self._refuse(
                f"has the labels {', '.join(names)}, and the student has {', '.join(own)}: give --labels in its order"
            )

    def _check_tokens(self, tokenizer: Tokenizer) -> None:
        """Weights without a tokenizer are believed."""
        try:
            _, theirs = self.saved.tokenizer()
        except UserError:
            return
        if theirs.vocab_size != tokenizer.vocab_size:
            self._refuse(f"has a tokenizer of {theirs.vocab_size} tokens, and the student's has {tokenizer.vocab_size}")
        for index in range(theirs.vocab_size):
            if theirs.token(index) != tokenizer.token(index):
                both = f"{theirs.token(index)!r} there and {tokenizer.token(index)!r} here"
                self._refuse(f"has another vocabulary: token {index} is {both}")

    def _refuse(self, why: str) -> None:
        raise UserError(f"the teacher {self.name} {why}")

    def on(self, program: TrainStep) -> "Lessons":
        """The teacher on the mesh of a student.

        Raises:
          UserError: it does not divide over the mesh, is damaged, or can't be read.
        """
        ours, training = program.config, program.config.training
        sizes = {"sequence_length": ours.model.sequence_length, "vocab_multiple": ours.model.vocab_multiple}
        sizes |= {"global_batch_size": training.global_batch_size, "microbatch_size": training.microbatch_size}
        settings = sizes | {"compute_dtype": training.compute_dtype, "layers_per_stage": None, "teacher": None}
        try:
            placed = ShardedModel(without_training(self.saved.config, ours.parallel, **settings), program.mesh)
        except UserError as e:
            raise UserError(f"the teacher {self.name} does not fit the run: {e}") from e
        return Lessons(program, placed, self.saved.parameters(placed))


def taught(config: Config) -> tuple[Config, Model | None]:
    """A config with what its teacher's weights say of themselves, and the teacher's model; None without one.

    Raises:
      UserError: there are no such weights, or the student can't learn from them.
    """
    if config.finetuning.teacher is None:
        return config, None
    return Teacher(config.finetuning.teacher, NO_HINTS).described(config)


def _with_width(config: Config, theirs: Model) -> Config:
    return configs.replace(config, teacher_width=theirs.hidden_size if config.model.head == "language" else None)


class Lessons:
    """What a teacher adds to batches of a student.

    Args:
      program: the student's.
      placed: the teacher's model.
      parameters: its own, float32, of which matrices are kept in the compute type.
    """

    def __init__(self, program: TrainStep, placed: ShardedModel, parameters: Tree) -> None:
        self.program, self.placed = program, placed
        dtype = placed.config.training.compute_dtype
        cast = lambda record, a: a.astype(dtype) if gathers_in_compute_dtype(record.axes) else a  # noqa: E731
        self.parameters = placed.on_mesh(jax.tree.map, cast, placed.records, parameters)
        added = program.abstract_step_batch()
        self._place = added[TEACHER].sharding
        self._tables: dict[str, Array] = {}
        if TEACHER_TABLE in added:
            table = self.parameters.get("output", self.parameters["embedding"])
            self._tables[TEACHER_TABLE] = jax.device_put(table, added[TEACHER_TABLE].sharding)

    def __call__(self, batch: Batch) -> Batch:
        """The batch, with what the teacher makes of it."""
        read = {name: array for name, array in batch.items() if name != "sample_index"}
        return {**batch, TEACHER: self.placed.on_mesh(self._compiled, self.parameters, read), **self._tables}

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._said, out_shardings=self._place)

    def _said(self, parameters: Tree, batch: Batch) -> Array:
        count = num_microbatches(self.program.config, self.program.shape, batch["tokens"].shape[0])
        with use_rules(self.placed.layout.rules):
            model = self.placed.inference_model(parameters)
            stream = self.placed.final_hidden_states(parameters, batch, count)
            if isinstance(model, GPT):
                return reshard(model.final_hidden(stream), spec("batch", "seq", "embed"))
            return cast(GivesOutputs, model).outputs(HiddenStates(stream), batch)
