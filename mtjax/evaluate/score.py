"""Rows through a model on a mesh: log-probabilities of given tokens, in batches of few shapes."""

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
from mtjax.evaluate.rows import Row, Scores
from mtjax.models.families.gpt import GPT
from mtjax.models.layer_context import PADDING_MASK
from mtjax.models.sharded_model import ShardedModel, Tree
from mtjax.sharding.axes import use_rules
from mtjax.sharding.context.zigzag import token_order
from mtjax.sharding.placement import context_degree, global_batch, process_rows, replicated
from mtjax.sharding.vocab import vocab_parallel_scores

SHORTEST = 64
"""Tokens of the shortest shape; the next ones are twice as long each, up to the model's sequence."""


class Scorer:
    """Scores rows with a model on its mesh: samples split over `data`, the model over `model` and stages.

    Args:
      placed: a GPT or Llama; its global batch is how many rows go through it at once.
      longest: most tokens of a row; the model's sequence when None.

    Raises:
      UserError: the model does not predict the next token, or the mesh does not divide a row.
    """

    def __init__(self, placed: ShardedModel, longest: int | None = None) -> None:
        if not issubclass(placed.family, GPT):
            raise UserError(
                f"{named(placed.config.model)} does not predict the next token: evaluate a gpt or llama model"
            )
        self.placed = placed
        self.longest = longest or placed.config.model.sequence_length
        self.batch = placed.config.training.global_batch_size
        parts = placed.sample_length_multiple
        if self.longest % parts:
            raise UserError(f"on mesh {placed.shape} a row is a multiple of {parts} tokens, and {self.longest} is not")
        self._mine = process_rows(placed.batch_sharding, self.batch)

    @cached_property
    def lengths(self) -> list[int]:
        """The shapes that programs are compiled for: tokens of a row."""
        parts = self.placed.sample_length_multiple
        steps = (SHORTEST << i for i in range(self.longest.bit_length()))
        return [n for n in steps if n < self.longest and n % parts == 0] + [self.longest]

    def batches(self, rows: Sequence[Row]) -> list[list[int]]:
        """Numbers of the rows that go through the model together: those of a shape, in their order."""
        shapes = np.searchsorted(self.lengths, [len(row.tokens) - 1 for row in rows])
        groups = [np.flatnonzero(shapes == shape) for shape in range(len(self.lengths))]
        return [group[i : i + self.batch].tolist() for group in groups for i in range(0, len(group), self.batch)]

    def score(self, parameters: Tree, rows: Sequence[Row]) -> Scores:
        """The scores of at most a batch of rows. Sums are made in float64, so they don't depend on how rows are cut."""
        length = self.lengths[int(np.searchsorted(self.lengths, max(len(row.tokens) for row in rows) - 1))]
        tokens, labels = np.zeros((2, self.batch, length), np.int32)
        counts, is_read = np.zeros((2, self.batch, length), bool)
        for i, row in enumerate(rows):
            read = len(row.tokens) - 1
            tokens[i, :read], labels[i, :read], counts[i, row.first - 1 : read] = row.tokens[:-1], row.tokens[1:], True
            is_read[i, :read] = True
        arrays = {"tokens": tokens, "labels": labels, PADDING_MASK: is_read.astype(np.int32)}
        local = {name: array[self._mine] for name, array in arrays.items()}
        batch = global_batch(self.placed.batch_sharding, local, self.batch)
        out = self.placed.on_mesh(self._compiled, parameters, batch)
        log_probability, is_best = (np.asarray(array) for array in out)
        counts = counts[:, token_order(context_degree(self.placed.batch_sharding), length)]
        total = np.where(counts, log_probability.astype(np.float64), 0.0).sum(1)
        return Scores(total[: len(rows)], np.all(is_best | ~counts, axis=1)[: len(rows)])

    def lower(self, length: int | None = None) -> jax.stages.Lowered:
        """The program for rows of a length, lowered from abstract values."""
        shape = (self.batch, length or self.lengths[-1])
        array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placed.batch_sharding)
        batch = dict.fromkeys(("tokens", "labels", PADDING_MASK), array)
        return self.placed.on_mesh(self._compiled.lower, self.placed.restore_target, batch)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._score, out_shardings=replicated(self.placed.mesh))

    def _score(self, parameters: Tree, batch: dict[str, Array]) -> tuple[Array, Array]:
        placed = self.placed
        with use_rules(placed.layout.rules):
            model = placed.inference_model(parameters)
            assert isinstance(model, GPT)  # __init__ has looked
            read = {name: batch[name] for name in ("tokens", PADDING_MASK)}
            hidden = model.final_norm(placed.final_hidden_states(parameters, read))
            return vocab_parallel_scores(hidden, model.output_table[...], batch["labels"], placed.loss_options)


def score_all(scorer: Scorer, parameters: Tree, rows: Sequence[Row], kept: SavedAnswers) -> Iterator[int]:
    """Scores the rows that are not `kept` yet, batch by batch, and yields how many are."""
    missing = [i for i in range(len(rows)) if i not in kept.answers]
    for batch in scorer.batches([rows[i] for i in missing]):
        numbers = [missing[i] for i in batch]
        scores = scorer.score(parameters, [rows[i] for i in numbers])
        answers = zip(scores.log_probability.tolist(), scores.all_best.tolist(), strict=True)
        kept.add(dict(zip(numbers, answers, strict=True)))
        yield len(kept.answers)
