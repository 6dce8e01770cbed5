"""The interface that generation requires of a model."""

from typing import TYPE_CHECKING, Any, Protocol

from flax import nnx
from jax import Array

from mtjax.models.language_model import LanguageModel
from mtjax.models.layer import Stack
from mtjax.models.layer_context import LayerContext
from mtjax.sharding.vocab import OutputOptions

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions


class Writer(LanguageModel, Protocol):
    """A model that generates text, token by token."""

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The stacks whose layers generate text, in their order."""
        ...

    @property
    def output_table(self) -> nnx.Param:
        """[vocab, embed]"""
        ...

    @property
    def output_parameters(self) -> tuple[Any, Array | None]:
        """The output table, and the bias of the logits, if any."""
        ...

    def logit_options(self, vocab_size: int) -> OutputOptions:
        """Returns how logits of this many tokens are computed."""
        ...

    def embed_new(self, tokens: Array, cache_positions: "CachePositions", length: int) -> tuple[Array, LayerContext]:
        """Embeds new tokens of sequences in KV caches of `length` tokens.

        Returns:
          Hidden states [batch, act_seq, embed], and the layers' other inputs.
        """
        ...

    def final_hidden(self, x: Array) -> Array:
        """Prepares the hidden states after the last layer, [batch, act_seq, embed], for the output table."""
        ...
