"""The tables of a language model: embeds token ids by rows of the vocabulary's table and positions; computes logits."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import embedding_width, padded_vocab_size
from mtjax.layout.weights import embedding_weights
from mtjax.models.layer_context import RESIDUAL
from mtjax.models.linear import Linear, normal
from mtjax.models.project import reshard_sequence
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import OutputOptions
from mtjax.sharding.vocab_embedding import vocab_parallel_embedding

EMBEDDING_SITE = 2**31 - 1
"""Dropout site of the embeddings, distinct from every layer's number."""


def vocabulary_table(model: Model, key: Array, std: float | None = None) -> nnx.Param:
    """Draws a table [vocab, embed] with a row for each token of the padded vocabulary; `std` is init_std when None."""
    sizes = embedding_weights(embedding_width(model), rows=padded_vocab_size(model))
    return normal(key, sizes["embedding"], model.init_std if std is None else std)


def position_table(model: Model, length: int, key: Array) -> nnx.Param | None:
    """Draws a table [positions, embed] of `length` positions; returns None where positions are not learned."""
    sizes = embedding_weights(model.hidden_size, positions=length)["positions"]
    return normal(key, sizes, model.init_std) if model.position == "learned" else None


def embed_tokens(
    table: nnx.Param,
    positions: nnx.Param | None,
    tokens: Int[Array, "batch seq"],
    dtype: jax.typing.DTypeLike,
    position_ids: Int[Array, "batch seq"] | None = None,
    local_positions: Int[Array, " seq"] | None = None,
    scale: float = 1.0,
    project_in: Linear | None = None,
) -> Float[Array, "batch act_seq embed"]:
    """Looks up the tokens' rows of the vocabulary's table, scales them, takes them to the width of the hidden states if
    they have another, and adds the vectors of their positions if learned.

    Args:
      table: [vocab, embed], float32.
      positions: [seq, embed], float32; None where positions are not learned.
      tokens: ids.
      dtype: of the result.
      position_ids: of each token; its position in the sample when None.
      local_positions: of this rank's tokens in their samples; 0, 1, ... when None.
      scale: factor of the rows, rounded to `dtype`, as Gemma's is.
      project_in: the matrix from the table's width to that of the hidden states; None if they are equal.
    """
    x = vocab_parallel_embedding(table[...], tokens, dtype)
    x = x if scale == 1 else x * jnp.asarray(scale, dtype)
    x = x if project_in is None else project_in(x)
    if positions is None:
        return x
    vectors = positions[...].astype(dtype)
    if position_ids is None:
        # Positions are the same for all samples: a slice, [seq, embed], sharded like the hidden states' sequence.
        local_vectors = vectors[: tokens.shape[1]] if local_positions is None else vectors[local_positions]
        return x + reshard(local_vectors, spec("act_seq", "act_embed"))
    return x + vectors.at[position_ids].get(out_sharding=spec(*RESIDUAL))


def in_table(positions: nnx.Param | None, ids: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Clips position ids to the table's length: padding and idle slots may have any position, and rows outside the
    table would read as NaN."""
    return ids if positions is None else jnp.minimum(ids, len(positions[...]) - 1)


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
        table, bias, options = self.output_head()
        x, weight, sharding = reshard_sequence(hidden, "seq"), table.astype(hidden.dtype), spec("batch", "seq", "vocab")
        # Accumulated in float32, as in the loss: differences of large logits matter.
        products = jnp.einsum("bsh,vh->bsv", x, weight, preferred_element_type=jnp.float32, out_sharding=sharding)
        return options.logits(products, bias)
