"""Families of models by name, and the interface that a train step requires of each."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Protocol

import jax
from jax import Array

from mtjax.config import Config
from mtjax.config.families import is_decoder
from mtjax.models.families.gpt import GPT
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


def _late(name: str) -> type[LanguageModel]:
    """Imports a class of this package by the name of its file and its own: what a run does not use is not."""
    return resolve_name(f"{__package__}.{name}")


MODEL_CLASSES: Mapping[str, Callable[[], type[LanguageModel]]] = {
    "gpt": lambda: GPT,
    "llama": lambda: GPT,
    "hybrid": lambda: _late("hybrid:Hybrid"),
    "bert": lambda: _late("bert:BERT"),
    "t5": lambda: _late("t5:T5"),
    "retro": lambda: _late("retro:Retro"),
}
"""Family -> returns its language model."""


def model_class(config: Config) -> type[LanguageModel]:
    """Returns the class of a config's family with its head, and with the losses of a student where it has a teacher."""
    # Heads, teachers and further predictions are subclasses: the language model knows none of them.
    if config.model.head != "language":
        return _late("finetuned:FinetunedDecoder" if is_decoder(config.model) else "finetuned:FinetunedEncoder")
    if config.finetuning.teacher is not None:
        return _late("distilled:DistilledGPT")
    return _late("predicting:PredictingGPT") if config.model.mtp_num_layers else MODEL_CLASSES[config.model.family]()
