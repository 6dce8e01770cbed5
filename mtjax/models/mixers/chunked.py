"""Retro's cross-attentions (arXiv 2112.04426): of a decoder's chunks to their neighbours, and of neighbours to the
chunk that asked for them."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from mtjax.config import Model
from mtjax.models.kernels.xla import HEADS, softmax_attention
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.cross import PROBABILITIES_SITE, CrossAttention
from mtjax.models.project import reshard_sequence
from mtjax.sharding.axes import spec


class ChunkedCrossAttention(CrossAttention):
    """Attention from each token to all neighbours of the last chunk that ends with it or before it."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        self.chunk = model.retro_chunk

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Attends to the encoded neighbours of the context, [samples x chunks x neighbours, tokens, embed]."""
        assert context.encoded is not None
        query, ahead = self.query(reshard_sequence(x, "seq")), self.chunk - 1
        # What the last token of a chunk and the chunk - 1 tokens after it read is the same: a row.
        behind = jnp.pad(query[:, ahead:], ((0, 0), (0, ahead), (0, 0), (0, 0)))
        rows = split_rows(behind, query.shape[1] // self.chunk)
        key, value = (merge_rows(a, len(a) // len(rows)) for a in self.keys_and_values(context.encoded))
        # Rows of one sample draw different masks.
        keys = keys_of_rows(context.dropout_keys, len(rows))
        mixed = merge_rows(self._attend(rows, key, value, keys), query.shape[1] // self.chunk)
        mixed = jnp.pad(mixed, ((0, 0), (ahead, 0), (0, 0), (0, 0)))[:, : query.shape[1]]
        # The first tokens read nothing, and get nothing: not even the bias.
        reads = jnp.arange(query.shape[1])[None] >= ahead
        reads = reads if context.retro_reads is None else reads & (context.retro_reads > 0)
        return jnp.where(reads[..., None], self.output(mixed), 0), state

    def _attend(self, query: Array, key: Array, value: Array, dropout_keys: Array | None) -> Array:
        """Attends from all queries of a row to all of its keys: padding is read, too, as in Megatron."""
        everything = jnp.ones((1, 1, 1, key.shape[1]), bool)
        return softmax_attention(query, key, value, everything, self.options, dropout_keys, site=PROBABILITIES_SITE)


class NeighbourCrossAttention(ChunkedCrossAttention):
    """Attention from each token of a neighbour to the chunk that asked for it."""

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Attends from neighbours, [samples x chunks x neighbours, tokens, embed], to the decoder's normalized hidden
        states in `context.retro_normed`, [samples, tokens, embed]."""
        assert context.retro_normed is not None
        query = self.query(reshard_sequence(x, "seq"))
        chunks = context.retro_normed.shape[1] // self.chunk
        key, value = (split_rows(a, chunks) for a in self.keys_and_values(context.retro_normed))
        each = len(query) // len(key)
        # The neighbours of a chunk are rows of one product here, and share the first one's key.
        keys = None if context.dropout_keys is None else context.dropout_keys[::each]
        return self.output(split_rows(self._attend(merge_rows(query, each), key, value, keys), each)), state


def split_rows(x: Float[Array, "batch seq heads head_dim"], parts: int) -> Float[Array, "rows part heads head_dim"]:
    """Cuts each sample into `parts` rows: [batch x parts, seq / parts, heads, head_dim]."""
    return x.reshape(len(x) * parts, -1, *x.shape[2:], out_sharding=spec(*HEADS))


def merge_rows(x: Float[Array, "rows part heads head_dim"], parts: int) -> Float[Array, "batch seq heads head_dim"]:
    """Joins each `parts` consecutive rows: the inverse of `split_rows`."""
    return x.reshape(len(x) // parts, -1, *x.shape[2:], out_sharding=spec(*HEADS))


def keys_of_rows(keys: Key[Array, " batch"] | None, rows: int) -> Key[Array, " rows"] | None:
    """Derives a dropout key for each row; every sample has the same number of rows."""
    if keys is None:
        return None
    each = jnp.arange(rows // len(keys))
    return jax.vmap(lambda key: jax.vmap(lambda number: jax.random.fold_in(key, number))(each))(keys).reshape(rows)
