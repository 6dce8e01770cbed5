"""The teacher of knowledge distillation: a frozen model with the student's vocabulary and task, on the same mesh."""

import dataclasses
from functools import cached_property
from typing import Any, cast

import jax
from jax import Array
from jax.sharding import reshard

from mtjax import config as configs
from mtjax.config import Config, Model
from mtjax.config.families import is_decoder
from mtjax.config.sizes import embedding_width, output_shape
from mtjax.convert.saved_model import NO_HINTS, Hints, SavedModel, model_of, without_training
from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.families.gpt.model import GPT
from mtjax.layout.divisibility import num_microbatches
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.models.finetuned import GivesOutputs
from mtjax.models.language_model import HiddenStates
from mtjax.models.sharded_model import GlobalBatch, ShardedModel, Tree
from mtjax.models.teacher import TEACHER, TEACHER_TABLE
from mtjax.sharding.axes import spec, use_rules
from mtjax.train.step import TrainStep


class Teacher:
    """The weights of a teacher.

    Args:
      name: the value of `--teacher`.
      hints: how the vocabulary is padded for the mesh.
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
        """Checks that a student can be distilled from the teacher, and returns its config with `teacher_width`.

        Raises:
          UserError: it can't be.
        """
        self._check_models(self.saved.config.model, config)
        if missing := sorted(name for name in self.saved.source.origin.fresh if name.startswith("head.")):
            self._refuse(f"has no weights for {', '.join(missing)}: finetune it on the same task first")
        self._check_labels(config)
        self._check_tokens(tokenizer)
        return _with_width(config, self.saved.config.model)

    def checked_without_weights(self, config: Config) -> tuple[Config, Model]:
        """Returns `checked` without reading weights, and the teacher's model for the student's batches; for plans.

        Raises:
          UserError: there are no such weights, or the student can't be distilled from them.
        """
        self._check_models(self.model, config)
        return _with_width(config, self.model), self.model_for(config)

    def model_for(self, config: Config) -> Model:
        """Returns the teacher's model with the student's sequence length and padding of the vocabulary."""
        sizes = {"sequence_length": config.model.sequence_length, "vocab_multiple": config.model.vocab_multiple}
        return dataclasses.replace(self.model, **sizes)

    @cached_property
    def model(self) -> Model:
        """The teacher's model, from the metadata of its weights.

        Raises:
          UserError: there are none.
        """
        return model_of(self.name, "--teacher", self.hints)

    def _check_models(self, theirs: Model, config: Config) -> None:
        """Checks that the teacher has the student's vocabulary and head, and reads its batches.

        Raises:
          UserError: it does not.
        """
        ours = config.model
        if config.optimizer.label_smoothing or config.optimizer.z_loss:
            raise UserError("--label-smoothing and --z-loss cannot be combined with --teacher: remove them")
        if ours.head == "regression":
            raise UserError(
                "--teacher cannot be combined with --task regress, which has no probabilities: remove --teacher"
            )
        if theirs.family != ours.family and not (is_decoder(theirs) and is_decoder(ours)):
            self._refuse(
                f"is a {theirs.family}, but the student is a {ours.family}: both must be decoders (gpt, llama), or of "
                "the same family"
            )
        if theirs.head != ours.head:
            theirs_head, ours_head = (
                "a language head" if head == "language" else f"a head for {head}" for head in (theirs.head, ours.head)
            )
            self._refuse(f"has {theirs_head}, but the student has {ours_head}: finetune it on the same task first")
        if theirs.vocab_size != ours.vocab_size:
            self._refuse(
                f"has a vocabulary of {theirs.vocab_size}, but the student's has {ours.vocab_size}: they must be equal"
            )
        if ours.head == "language" and theirs.output_bias:
            self._refuse("has output_bias, and distillation reads no bias of a teacher's logits: use another teacher")
        for name, our in output_shape(ours).items():
            if ours.head == "language" and (their := output_shape(theirs)[name]) != our:
                self._refuse(f"has output_{name} {their}, but the student has {our}: they must be equal")
        if theirs.position == "learned" and theirs.sequence_length < ours.sequence_length:
            self._refuse(
                f"has {theirs.sequence_length} learned positions, fewer than sequence_length {ours.sequence_length}: "
                "lower --sequence-length"
            )

    def _check_labels(self, config: Config) -> None:
        """Checks that the teacher has the student's classes.

        Raises:
          UserError: it does not.
        """
        theirs, ours = self.saved.config, config
        if theirs.model.head not in ("classification", "choices"):
            return
        their_labels, our_labels = theirs.finetuning.labels, ours.finetuning.labels
        if theirs.model.num_labels != ours.model.num_labels:
            self._refuse(f"has {theirs.model.num_labels} labels, but the student has {ours.model.num_labels}")
        if their_labels and our_labels and their_labels != our_labels:
            self._refuse(
                f"has the labels {', '.join(their_labels)}, but the student has {', '.join(our_labels)}: add --labels "
                "in the teacher's order"
            )

    def _check_tokens(self, tokenizer: Tokenizer) -> None:
        """Checks that the tokenizers have the same tokens; skipped for weights without a tokenizer."""
        try:
            _, theirs = self.saved.tokenizer()
        except UserError:
            return
        if theirs.vocab_size != tokenizer.vocab_size:
            self._refuse(f"has a tokenizer of {theirs.vocab_size} tokens, but the student's has {tokenizer.vocab_size}")
        # Distillation compares logits of the same ids.
        for index in range(theirs.vocab_size):
            if theirs.token(index) != tokenizer.token(index):
                tokens = f"{theirs.token(index)!r}, and the student's {tokenizer.token(index)!r}"
                self._refuse(f"has another vocabulary: its token {index} is {tokens}")

    def _refuse(self, why: str) -> None:
        raise UserError(f"the teacher {self.name} {why}")

    def load(self, program: TrainStep) -> "TeacherTargets":
        """Loads the teacher onto the mesh of a student.

        Raises:
          UserError: the mesh does not divide it, or it is corrupted or can't be read.
        """
        ours, training = program.config, program.config.training
        sizes = {"sequence_length": ours.model.sequence_length, "vocab_multiple": ours.model.vocab_multiple}
        sizes |= {"global_batch_size": training.global_batch_size, "microbatch_size": training.microbatch_size}
        # The student's batches are read as they are: same length, rows and mesh.
        settings = sizes | {"compute_dtype": training.compute_dtype, "layers_per_stage": None, "teacher": None}
        try:
            sharded_model = ShardedModel(without_training(self.saved.config, ours.parallel, **settings), program.mesh)
        except UserError as e:
            raise UserError(f"the teacher {self.name} can't be used in this run: {e}") from e
        return TeacherTargets(program, sharded_model, self.saved.parameters(sharded_model))


def with_teacher(config: Config) -> tuple[Config, Model | None]:
    """Returns a config with `teacher_width`, and the teacher's model; None without a teacher.

    Raises:
      UserError: there are no such weights, or the student can't be distilled from them.
    """
    if config.finetuning.teacher is None:
        return config, None
    return Teacher(config.finetuning.teacher, NO_HINTS).checked_without_weights(config)


def _with_width(config: Config, theirs: Model) -> Config:
    """Returns the config with the width of the teacher's output table, if its targets are hidden states."""
    width = embedding_width(theirs) if config.model.head == "language" else None
    return configs.replace(config, teacher_width=width)


class TeacherTargets:
    """Adds the teacher's targets to batches of a student.

    Args:
      program: the student's training step.
      sharded_model: the teacher's model.
      parameters: the teacher's parameters, float32; matrices are cast to compute_dtype.
    """

    def __init__(self, program: TrainStep, sharded_model: ShardedModel, parameters: Tree) -> None:
        self.program, self.sharded_model = program, sharded_model
        # Matrices are used in compute_dtype only; a copy in float32 would waste memory.
        dtype = sharded_model.config.training.compute_dtype
        cast = lambda record, a: a.astype(dtype) if gathers_in_compute_dtype(record.logical_axes) else a  # noqa: E731
        self.parameters = sharded_model.on_mesh(jax.tree.map, cast, sharded_model.records, parameters)
        added = program.abstract_step_batch()
        self._sharding = added[TEACHER].sharding
        self._tables: dict[str, Array] = {}
        if TEACHER_TABLE in added:
            # A tied teacher's output table is its embedding.
            table = self.parameters.get("output", self.parameters["embedding"])
            # Once: it is the same for all batches.
            self._tables[TEACHER_TABLE] = jax.device_put(table, added[TEACHER_TABLE].sharding)

    def __call__(self, batch: GlobalBatch) -> GlobalBatch:
        """Returns the batch with the teacher's outputs (hidden states, or logits of a task's head) added."""
        # The teacher runs without dropout, for which alone samples are numbered.
        read = {name: array for name, array in batch.items() if name != "sample_index"}
        return {**batch, TEACHER: self.sharded_model.on_mesh(self._compiled, self.parameters, read), **self._tables}

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._outputs, out_shardings=self._sharding)

    def _outputs(self, parameters: Tree, batch: GlobalBatch) -> Array:
        """Runs the teacher: final hidden states [batch, seq, embed] with a language head, else the head's outputs."""
        count = num_microbatches(self.program.config, self.program.mesh_shape, batch["tokens"].shape[0])
        with use_rules(self.sharded_model.layout.rules):
            model = self.sharded_model.inference_model(parameters)
            hidden_states = final_hidden_states(self.sharded_model, parameters, batch, count)
            if isinstance(model, GPT):
                # The student's loss computes the teacher's logits in chunks, from hidden states and the output table.
                return reshard(model.final_hidden(hidden_states), spec("batch", "seq", "embed"))
            return cast(GivesOutputs, model).outputs(HiddenStates(hidden_states), batch)
