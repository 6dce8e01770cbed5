"""T5's relative positions (section 2.1 of arXiv 1910.10683)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import head_dim
from mtjax.layout.weights import relative_table
from mtjax.models.ops import draw_normal
from mtjax.sharding.axes import spec


def initial_query_scale(model: Model) -> float:
    """Returns the factor of the initial query weights: head_dim^-0.5 where scores are not scaled, as in T5, else 1."""
    return head_dim(model) ** -0.5 if model.position == "relative" else 1.0


class RelativeBias(nnx.Module):
    """A number per head and bucket of distances, added to the scores: of every layer of a stack, or of one."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the table, [buckets, heads]."""
        self.table = draw_normal(key, relative_table(model.relative_buckets, model.num_heads), model.init_std)
        self.max_distance = model.relative_max_distance

    def __call__(self, length: int, *, is_causal: bool) -> Float[Array, "1 heads seq key_seq"]:
        """Computes float32 biases; each rank has those of its heads."""
        # A lookup for every pair of tokens has a gradient that adds all of them to the few numbers of the table, by
        # atomic operations. All pairs at a distance have the same bias: it is computed once per distance, by a product.
        # `_by_pairs` cuts rows of 2 size - 2, which one token would make empty.
        size = max(length, 2)
        back = jnp.arange(size - 1, -size, -1)
        chosen = jax.nn.one_hot(self._buckets(back, is_causal=is_causal), len(self.table[...]))
        by_distance = jnp.einsum("db,bh->hd", chosen, self.table[...], precision=lax.Precision.HIGHEST)
        return _by_pairs(by_distance, size)[None, :, :length, :length]

    def at(self, positions: Int[Array, "batch seq"], length: int) -> Float[Array, "batch heads seq key_seq"]:
        """Computes float32 biases of a decoder's queries at these positions, to keys at 0, 1, ... `length` - 1."""
        # In decode there are few queries, and no gradient.
        biases = self.table[...].at[self._buckets(positions[:, :, None] - jnp.arange(length), is_causal=True)]
        return biases.get(out_sharding=spec("batch", "seq", "key_seq", "heads")).transpose(0, 3, 1, 2)

    def _buckets(self, back: Int[Array, "..."], *, is_causal: bool) -> Int[Array, "..."]:
        count = self.table.shape[0]
        return relative_buckets(back, is_causal=is_causal, num_buckets=count, max_distance=self.max_distance)


def _by_pairs(by_distance: Float[Array, "heads distances"], length: int) -> Float[Array, "heads seq key_seq"]:
    """Expands the values of distances length - 1, ..., 1 - length from query to key to all pairs of tokens."""
    # Repeated rows of 2 length - 1 distances, read again in rows of 2 length - 2, move by one distance per row: row q
    # begins at distance q. The gradient is a sum over rows.
    heads, distances = by_distance.shape
    rows = jnp.broadcast_to(by_distance[:, None], (heads, length, distances), out_sharding=spec("heads", None, None))
    flat = rows.reshape(heads, -1, out_sharding=spec("heads", None))[:, length - 1 :][:, : length * (distances - 1)]
    return flat.reshape(heads, length, -1, out_sharding=spec("heads", "seq", "key_seq"))[:, :, :length]


def relative_buckets(
    back: Int[Array, "..."], *, is_causal: bool, num_buckets: int, max_distance: int
) -> Int[Array, "..."]:
    """Returns the bucket of each distance `back` from a query to a key before it.

    Half of the buckets are single distances; the other half reach up to `max_distance` in logarithmic steps. In
    bidirectional attention, keys after the query have the upper half of all buckets; in causal attention, bucket 0.
    """
    count = num_buckets if is_causal else num_buckets // 2
    first = 0 if is_causal else jnp.where(back < 0, count, 0)
    distance = jnp.maximum(back, 0) if is_causal else jnp.abs(back)
    single = count // 2
    # The bucket grows by `count - single` while the distance grows from `single` to `max_distance`.
    # The maximum avoids log 0 in the branch that is not taken.
    growth = jnp.log(jnp.maximum(distance, 1) / single) / jnp.log(max_distance / single)
    far = jnp.minimum(single + (growth * (count - single)).astype(jnp.int32), count - 1)
    return first + jnp.where(distance < single, distance, far)
