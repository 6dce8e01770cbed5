"""Scores rows with a model on a mesh: log-probabilities of given tokens, in batches of a few shapes."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.config.sizes import named
from mtjax.errors import UserError
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.rows import RowScores, ScoredRow
from mtjax.families.gpt.model import GPT
from mtjax.layout.divisibility import parts_of_samples
from mtjax.models.final_hidden_states import final_hidden_states
from mtjax.models.layer_context import PADDING_MASK
from mtjax.models.sharded_model import ShardedModel, Tree
from mtjax.sharding.axes import use_rules
from mtjax.sharding.context.zigzag import token_order
from mtjax.sharding.global_batch import context_degree, global_batch, process_rows
from mtjax.sharding.param_specs import replicated
from mtjax.sharding.vocab_scores import vocab_parallel_scores

SHORTEST = 64
"""Length of the shortest shape; each next one is twice as long, up to the longest row."""


class Scorer:
    """Scores rows with data, tensor, context and pipeline parallelism.

    Args:
      sharded_model: a GPT or Llama; its global batch size is the number of rows per batch.
      longest: most tokens of a row; None for the model's sequence length.

    Raises:
      UserError: the model does not predict the next token, or the mesh does not divide a row.
    """

    def __init__(self, sharded_model: ShardedModel, longest: int | None = None) -> None:
        if not issubclass(sharded_model.model_class, GPT):
            raise UserError(
                f"{named(sharded_model.config.model)} does not predict the next token: evaluate a gpt or llama model"
            )
        if sharded_model.config.model.family == "retro":
            raise UserError(
                "a retro reads neighbours, which this text does not have: evaluate its run with --task perplexity "
                "--neighbours, or its decoder, which mtjax convert --without-encoder writes as a gpt"
            )
        self.sharded_model = sharded_model
        self.longest = longest or sharded_model.config.model.sequence_length
        self.batch = sharded_model.config.training.global_batch_size
        self._parts = parts_of_samples(sharded_model.layout, sharded_model.mesh_shape)
        if self.longest % self._parts:
            raise UserError(
                f"--sequence-length {self.longest} must be a multiple of {self._parts} on the mesh "
                f"{sharded_model.mesh_shape}"
            )
        # The rows of a batch that this process gives to its devices.
        self._mine = process_rows(sharded_model.batch_sharding, self.batch)

    @cached_property
    def lengths(self) -> list[int]:
        """The row lengths for which programs are compiled."""
        steps = (SHORTEST << i for i in range(self.longest.bit_length()))
        return [n for n in steps if n < self.longest and n % self._parts == 0] + [self.longest]

    def batches(self, rows: Sequence[ScoredRow]) -> list[list[int]]:
        """Groups the indices of rows into batches of rows with the same shape."""
        # Each row uses the shortest compiled shape that fits.
        shapes = np.searchsorted(self.lengths, [len(row.tokens) - 1 for row in rows])
        groups = [np.flatnonzero(shapes == shape) for shape in range(len(self.lengths))]
        # Shortest first: the first batches are done soon, and show whether the run works.
        return [group[i : i + self.batch].tolist() for group in groups for i in range(0, len(group), self.batch)]

    def score(self, parameters: Tree, rows: Sequence[ScoredRow]) -> RowScores:
        """Returns the scores of at most a batch of rows, summed in float64 so that they don't depend on the shape."""
        length = self.lengths[int(np.searchsorted(self.lengths, max(len(row.tokens) for row in rows) - 1))]
        tokens, labels = np.zeros((2, self.batch, length), np.int32)
        is_scored, is_read = np.zeros((2, self.batch, length), bool)
        for i, row in enumerate(rows):
            read = len(row.tokens) - 1
            tokens[i, :read], labels[i, :read] = row.tokens[:-1], row.tokens[1:]
            is_scored[i, row.first - 1 : read] = True
            # Causal layers ignore padding after a row, but a router would give it experts' capacity.
            is_read[i, :read] = True
        arrays = {"tokens": tokens, "labels": labels, PADDING_MASK: is_read.astype(np.int32)}
        local = {name: array[self._mine] for name, array in arrays.items()}
        batch = global_batch(self.sharded_model.batch_sharding, local, self.batch)
        out = self.sharded_model.on_mesh(self._compiled, parameters, batch)
        log_probability, is_best = (np.asarray(array) for array in out)
        # Outputs are in the zigzag order of context parallelism.
        is_scored = is_scored[:, token_order(context_degree(self.sharded_model.batch_sharding), length)]
        total = np.where(is_scored, log_probability.astype(np.float64), 0.0).sum(1)
        return RowScores(total[: len(rows)], np.all(is_best | ~is_scored, axis=1)[: len(rows)])

    def lower(self, length: int | None = None) -> jax.stages.Lowered:
        """Lowers the program for rows of a length, from abstract values."""
        shape = (self.batch, length or self.lengths[-1])
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.sharded_model.batch_sharding)
        batch = dict.fromkeys(("tokens", "labels", PADDING_MASK), array)
        return self.sharded_model.on_mesh(self._compiled.lower, self.sharded_model.restore_target, batch)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._score, out_shardings=replicated(self.sharded_model.mesh))

    def _score(self, parameters: Tree, batch: dict[str, Array]) -> tuple[Array, Array]:
        """Returns the log-probability of each label, and whether it is the most likely token; [batch, seq] both."""
        sharded_model = self.sharded_model
        with use_rules(sharded_model.layout.rules):
            model = sharded_model.inference_model(parameters)
            assert isinstance(model, GPT)  # checked in __init__
            read = {name: batch[name] for name in ("tokens", PADDING_MASK)}
            hidden = model.final_hidden(final_hidden_states(sharded_model, parameters, read))
            table, bias = model.output_parameters
            return vocab_parallel_scores(hidden, table, batch["labels"], sharded_model.loss_options, bias)


def score_all(scorer: Scorer, parameters: Tree, rows: Sequence[ScoredRow], saved: SavedAnswers) -> Iterator[int]:
    """Scores the rows that are not `saved` yet, batch by batch; yields the number of rows that are done."""
    missing = [i for i in range(len(rows)) if i not in saved.answers]
    for batch in scorer.batches([rows[i] for i in missing]):
        numbers = [missing[i] for i in batch]
        scores = scorer.score(parameters, [rows[i] for i in numbers])
        answers = zip(scores.log_probability.tolist(), scores.all_best.tolist(), strict=True)
        saved.add(dict(zip(numbers, answers, strict=True)))
        yield len(saved.answers)
