"""A student of a teacher (knowledge distillation, arXiv 1503.02531): losses that read the teacher's outputs."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from jax import Array

from mtjax.families.gpt.model import GPT
from mtjax.models.language_model import Batch, HiddenStates, Keys, Microbatch
from mtjax.models.pipeline_model import TrunkPipeline
from mtjax.models.teacher import HARD, SOFT, TEACHER, TEACHER_TABLE
from mtjax.sharding.distillation import vocab_parallel_distillation
from mtjax.sharding.vocab import LossOptions

Tree = Any


class DistilledGPT(GPT):
    """A language model that also learns the probabilities of its teacher, where a batch has them."""

    def token_losses(self, hidden: Array, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of each next token with its label and with the teacher's probabilities, [batch,
        seq]; in evaluation with its label alone."""
        # Validation batches have no teacher: their losses can be compared with those of a run without one.
        if TEACHER not in batch:
            return super().token_losses(hidden, batch, keys, options)
        table, bias = self.output_parameters
        targets = batch["labels"], batch[TEACHER], batch[TEACHER_TABLE]
        hard, soft = vocab_parallel_distillation(hidden, table, *targets, options, bias)
        return {HARD: hard, SOFT: soft}


@dataclass(frozen=True)
class DistilledTrunkPipeline(TrunkPipeline):
    """A student: its teacher's output table is among the frozen parameters, and losses read it from the batch."""

    tables: Batch = field(default_factory=dict)

    def with_frozen(self, frozen: Tree) -> Self:
        """See `LossFunction.with_frozen`."""
        # The teacher's table is not a parameter of the student: merged into its tree, it would have no place there.
        of_student = {name: below for name, below in frozen.items() if name != TEACHER}
        return replace(super().with_frozen(of_student), tables=frozen[TEACHER])

    def loss_sums(self, parameters: Tree, microbatch: Microbatch) -> dict[str, Array]:
        """See `LossFunction.loss_sums`."""
        return super().loss_sums(parameters, self._with_tables(microbatch))

    def head_losses(self, parameters: Tree, boundary: HiddenStates, microbatch: Microbatch) -> dict[str, Array]:
        """See `PipelineModel.head_losses`."""
        return super().head_losses(parameters, boundary, self._with_tables(microbatch))

    def _with_tables(self, microbatch: Microbatch) -> Microbatch:
        batch, weights, keys = microbatch
        return {**batch, **self.tables}, weights, keys
