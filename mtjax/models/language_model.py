"""The interface that a train step requires of a model, and the class of a config's model."""

from typing import Protocol

import jax
from jax import Array

from mtjax.config import Config
from mtjax.families.registry import FAMILIES, load_part
from mtjax.models.trunk import Batch, Trunk


class LanguageModel(Trunk, Protocol):
    """A model that a train step can train: a language model, or one with another head for finetuning.

    It has one loss or several, by name. A loss is the mean of its values over the global batch, weighted by
    `loss_weights`; the sum of the losses is minimized.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters; `nnx.Param`s that carry the logical names of their dimensions."""

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch that the model reads, each for one sample: without the batch dimension."""
        ...

    @staticmethod
    def loss_weights(batch: Batch) -> dict[str, Array]:
        """Returns the weight of each value of each loss: float32 [batch] or [batch, seq], in the shapes of `losses`."""
        ...

    @staticmethod
    def num_tokens(batch: Batch) -> Array:
        """Counts tokens of the batch without padding, for tokens per second."""
        ...


def model_class(config: Config) -> type[LanguageModel]:
    """Returns the class of a config's family with its head, and with the losses of a student where it has a teacher."""
    # Heads, teachers and further predictions are subclasses: the language model knows none of them.
    parts = FAMILIES[config.model.family]
    if config.model.head != "language":
        return load_part(parts.with_head)
    if config.finetuning.teacher is not None:
        return load_part(parts.distilled)
    return load_part(parts.predicting if config.model.mtp_num_layers else parts.model)
