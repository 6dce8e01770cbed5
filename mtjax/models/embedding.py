"""Embeds token ids: rows of the vocabulary's table, positions, token types."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import embedding_width, padded_vocab_size
from mtjax.models.layer_context import RESIDUAL
from mtjax.models.linear import Linear, normal
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab_embedding import vocab_parallel_embedding

EMBEDDING_SITE = 2**31 - 1
"""Dropout site of the embeddings, distinct from every layer's number."""


def vocabulary_table(model: Model, key: Array, std: float | None = None) -> nnx.Param:
    """Draws a table [vocab, embed] with a row for each token of the padded vocabulary; `std` is init_std when None."""
    sizes = {"vocab": padded_vocab_size(model), "embed": embedding_width(model)}
    return normal(key, sizes, model.init_std if std is None else std)


def position_table(model: Model, length: int, key: Array) -> nnx.Param | None:
    """Draws a table [positions, embed] of `length` positions; returns None where positions are not learned."""
    if model.position != "learned":
        return None
    return normal(key, {"positions": length, "embed": model.hidden_size}, model.init_std)


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
