"""Losses of pretrained trunks with another head: logits or a number for each text, or logits for each token.

The heads are transformers': `...ForSequenceClassification` is BERT's pooler, dropout and a linear layer on the first
token, for decoders a linear layer without bias on the last one; `BertForMultipleChoice` is the same with one logit for
each of a question's texts; `BertForQuestionAnswering` is a linear layer on every token.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Config, Model
from mtjax.config.families import kind_of
from mtjax.models.heads import class_losses, divergences
from mtjax.models.language_model import Batch, HiddenStates, Keys
from mtjax.models.teacher import HARD, SOFT, TEACHER
from mtjax.sharding.vocab import LossOptions

RowLosses = Callable[[Callable[[Array, Array], Array], Array, Array], Array]
"""(loss of logits and labels, outputs, labels or a teacher's outputs) -> a loss for each row of the batch."""


class GivesOutputs(Protocol):
    """A model with a head that returns logits or numbers."""

    row_losses: RowLosses

    def outputs(self, trunk_output: HiddenStates, batch: Batch, keys: Keys = None) -> Float[Array, "batch ..."]:
        """Computes float32 logits, or the number that a regression predicts, from the output of the last section."""
        ...


def squared_errors(loss: Any, outputs: Float[Array, "batch 1"], labels: Float[Array, " batch"]) -> Array:
    """Computes a regression's loss, [batch]; `loss` is not used."""
    return jnp.square(outputs[:, 0] - labels)


def choice_losses(loss: Any, outputs: Float[Array, "batch 1"], labels: Array, choices: int) -> Float[Array, " batch"]:
    """Computes the loss over the choices of each question, which are consecutive rows, repeated for each of them."""
    # Each row has the label of its question; a teacher has a logit per row, [batch, 1].
    of_question = labels.reshape(-1, choices) if labels.ndim > 1 else labels[::choices]
    # So that a mean over rows is the mean over questions.
    return jnp.repeat(loss(outputs.reshape(-1, choices), of_question), choices)


def span_losses(loss: Any, outputs: Float[Array, "batch seq 2"], labels: Array) -> Float[Array, " batch"]:
    """Computes the mean of the losses of each answer's first and last token."""
    # Classes are the positions of a text: [batch, 2, seq]. Labels are [batch, 2], a teacher's outputs [batch, seq, 2].
    return loss(outputs.swapaxes(1, 2), labels.swapaxes(1, 2) if labels.ndim > 2 else labels).mean(-1)


def row_losses_of(model: Model) -> RowLosses:
    """Returns the losses of the model's head."""
    heads: dict[str, RowLosses] = {
        "classification": lambda loss, outputs, labels: loss(outputs, labels),
        "regression": squared_errors,
        "choices": partial(choice_losses, choices=model.num_labels),
        "spans": span_losses,
    }
    return heads[model.head]


class Finetuned:
    """The batch and the losses of a trunk with another head."""

    def losses(
        self: GivesOutputs, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions
    ) -> dict[str, Array]:
        """Computes the loss of each row, [batch], by its label, and with a teacher also by its probabilities."""
        with jax.named_scope("loss"):
            outputs = self.outputs(trunk_output, batch, keys)
            hard = self.row_losses(class_losses, outputs, batch["label"])
            if TEACHER not in batch:
                return {"loss": hard}
            soft = self.row_losses(partial(divergences, temperature=options.temperature), outputs, batch[TEACHER])
            return {HARD: hard, SOFT: soft}

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of texts, labels and their weights: `mtjax.finetune.samples`."""
        length, kind = (config.model.sequence_length,), config.model.head
        names = ["tokens", "padding_mask", *(["token_types"] if kind_of(config.model) == "encoder" else [])]
        arrays = {name: jax.ShapeDtypeStruct(length, jnp.int32) for name in names}
        label = jax.ShapeDtypeStruct(
            (2,) if kind == "spans" else (), jnp.float32 if kind == "regression" else jnp.int32
        )
        return arrays | {"label": label, "weight": jax.ShapeDtypeStruct((), jnp.float32)}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the weight of each text's class."""
        return {"loss": batch["weight"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Counts tokens that are not padding."""
        return batch["padding_mask"].sum().astype(jnp.float32)
