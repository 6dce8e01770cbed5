"""The output table of a language model."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.models.project import reshard_sequence
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import OutputOptions


class WithVocabulary(nnx.Module):
    """A model whose last product is with the embedding table (tied), or with a separate output table."""

    embedding: nnx.Param
    output: nnx.Param | None
    """None where it is tied to the embedding table."""
    output_bias: nnx.Param | None = None
    """[vocab]: of the logits, if any."""
    output_options = OutputOptions(0)
    """Factor and soft cap of the logits."""

    @property
    def output_table(self) -> nnx.Param:
        """[vocab, embed]"""
        return self.embedding if self.output is None else self.output

    def output_head(self, vocab_size: int = 0) -> tuple[Any, Array | None, OutputOptions]:
        """Returns the output table, the bias of the logits, if any, and how logits of this many tokens are computed."""
        bias = None if self.output_bias is None else self.output_bias[...]
        return self.output_table[...], bias, replace(self.output_options, vocab_size=vocab_size)

    def logits(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Computes float32 logits over the padded vocabulary, which is sharded, from final hidden states.

        Training does not call it: its loss never gathers logits (`mtjax.sharding.vocab`).
        """
        x, sharding = reshard_sequence(hidden, "seq"), spec("batch", "seq", "vocab")
        table, bias, options = self.output_head()
        weight = table.astype(hidden.dtype)
        # Accumulated in float32, as in the loss: differences of large logits matter.
        products = jnp.einsum("bsh,vh->bsv", x, weight, preferred_element_type=jnp.float32, out_sharding=sharding)
        return options.logits(products, bias)
