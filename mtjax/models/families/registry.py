"""Families of models by name, and the interface that a train step requires of each."""

from collections.abc import Callable, Mapping
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


def _hybrid() -> type[LanguageModel]:
    from mtjax.models.families.hybrid import Hybrid

    return Hybrid


def _encoder() -> type[LanguageModel]:
    from mtjax.models.families.bert import BERT

    return BERT


def _encoder_decoder() -> type[LanguageModel]:
    from mtjax.models.families.t5 import T5

    return T5


def _retrieval() -> type[LanguageModel]:
    from mtjax.models.families.retro import Retro

    return Retro


MODEL_CLASSES: Mapping[str, Callable[[], type[LanguageModel]]] = {
    "gpt": lambda: GPT,
    "llama": lambda: GPT,
    "hybrid": _hybrid,
    "bert": _encoder,
    "t5": _encoder_decoder,
    "retro": _retrieval,
}
"""Family -> returns its language model; what a run does not use is not imported."""


def model_class(config: Config) -> type[LanguageModel]:
    """Returns the class of a config's family with its head, and with the losses of a student where it has a teacher."""
    # Heads, teachers and further predictions are subclasses: the language model knows none of them.
    if config.model.head != "language":
        from mtjax.models.families.finetuned import FinetunedDecoder, FinetunedEncoder

        return FinetunedDecoder if is_decoder(config.model) else FinetunedEncoder
    if config.finetuning.teacher is not None:
        from mtjax.models.families.distilled import DistilledGPT

        return DistilledGPT
    if config.model.mtp_num_layers:
        from mtjax.models.families.predicting import PredictingGPT

        return PredictingGPT
    return MODEL_CLASSES[config.model.family]()
