"""Families of models by name, and what a train step asks of each."""

from collections.abc import Mapping
from typing import Protocol

import jax
from flax import nnx
from jax import Array

from mtjax.config import Config
from mtjax.models.families.bert import BERT
from mtjax.models.families.finetuned import FinetunedDecoder, FinetunedEncoder
from mtjax.models.families.gpt import GPT
from mtjax.models.families.llama import Llama
from mtjax.models.families.t5 import T5
from mtjax.models.kv_cache import CachePositions
from mtjax.models.layer_context import LayerContext
from mtjax.models.stack import Stack
from mtjax.models.trunk import Batch, Trunk


class LanguageModel(Trunk, Protocol):
    """A model that a train step can train: of language, or of what finetuning makes of one.

    It has one loss or several, by name. A loss is the mean of its values over the global batch, weighted by
    `loss_weights`; the sum of the losses is minimised.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters; `nnx.Param`s that carry the logical names of their dimensions."""

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch that the model reads, each for one sample: without the batch dimension."""
        ...

    @staticmethod
    def loss_weights(batch: Batch) -> dict[str, Array]:
        """The weight of each value of each loss: float32 [batch] or [batch, seq], shaped as `losses` gives them."""
        ...

    @staticmethod
    def num_tokens(batch: Batch) -> Array:
        """Tokens of the batch, without padding, as tokens per second count them."""
        ...


class Writer(LanguageModel, Protocol):
    """A model that writes text, token by token."""

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The layers that read what is written, in the order in which they run."""
        ...

    @property
    def output_table(self) -> nnx.Param:
        """[vocab, embed]"""
        ...

    def embed_new(self, tokens: Array, reading: CachePositions, length: int) -> tuple[Array, LayerContext]:
        """The stream of new tokens of sequences in caches with room for `length`, and what layers read besides it."""
        ...

    def final_hidden(self, x: Array) -> Array:
        """Hidden states behind the last layer as the output table reads them."""
        ...


WRITERS: tuple[type[Writer], ...] = (GPT, T5)
"""A T5 reads a text before (`T5.encoded`), and writes another."""

MODEL_CLASSES: Mapping[str, type[LanguageModel]] = {"gpt": GPT, "llama": Llama, "bert": BERT, "t5": T5}

FINETUNED: Mapping[str, type[LanguageModel]] = {
    "gpt": FinetunedDecoder,
    "llama": FinetunedDecoder,
    "bert": FinetunedEncoder,
}
"""Those that can have another head than that of pretraining, with it."""


def model_class(config: Config) -> type[LanguageModel]:
    """The class of a config's family, with its head."""
    return (MODEL_CLASSES if config.model.head == "language" else FINETUNED)[config.model.family]
