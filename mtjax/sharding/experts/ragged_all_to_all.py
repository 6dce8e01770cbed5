"""All-to-alls of rows, a different number between each pair of ranks.

The numbers are known only when a program runs, so arrays are padded to the maximum. On GPUs a ragged all-to-all sends
the rows alone. XLA: it has none for CPUs, where a plain all-to-all sends the padding too.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import varying_like


class RaggedRouting(NamedTuple):
    """Which rows of every rank are sent to which ranks, to each rank at most once."""

    axes: Axes
    """Mesh axes of the all-to-all."""
    sizes: Int[Array, "ranks ranks"]
    """[i, j]: number of rows from rank i to rank j; the same on all ranks."""
    sent: Int[Array, " sent"]
    """Indices of this rank's rows, ordered by destination, one entry per destination; padded with `rows`."""
    received: Int[Array, " received"]
    """Indices, among the rows of all ranks, of those that this rank receives; padded with `ranks * rows`."""
    rows: int
    """Of each rank."""

    @classmethod
    def of(cls, is_sent: Bool[Array, "ranks rows ranks"], most: int, axes: Axes) -> "RaggedRouting":
        """Computes the routing.

        Args:
          is_sent: [source rank, row, destination rank].
          most: destinations of a row, at most.
          axes: mesh axes of the all-to-all.
        """
        # Every rank has the entire table, so it knows the sizes of all messages without communication.
        ranks, rows, rank = is_sent.shape[0], is_sent.shape[1], lax.axis_index(axes)
        from_here = lax.dynamic_index_in_dim(is_sent, rank, 0, keepdims=False).T
        to_here = lax.dynamic_index_in_dim(is_sent, rank, 2, keepdims=False)
        sent = _set_indices(from_here.reshape(-1), rows * most)
        # Indices into [destination, row]; the remainder is the row.
        sent = jnp.where(sent < ranks * rows, sent % rows, rows)
        sizes = is_sent.sum(1, dtype=jnp.int32)
        return cls(axes, sizes, sent, _set_indices(to_here.reshape(-1), ranks * rows), rows)

    @property
    def _route(self) -> "_Route":
        return _Route(self.axes, self.rows, len(self.sent), len(self.received))

    def dispatch(self, x: Float[Array, "rows width"]) -> Float[Array, "received width"]:
        """Sends this rank's rows x to their destinations; returns the received rows, padded with zeros."""
        return _send(self._route, take_rows(x, self.sent), self.sizes)

    def combine(self, y: Float[Array, "received width"]) -> Float[Array, "rows width"]:
        """Returns one result per received row to the row's rank, and adds them up for each row there, in float32."""
        # The sizes are transposed: what rank i received from j goes back from i to j.
        returned = jnp.asarray(_send(self._route.reverse, y, self.sizes.T), jnp.float32)
        total = varying_like(jnp.zeros((self.rows, y.shape[1]), jnp.float32), returned)
        return total.at[self.sent].add(returned, mode="drop")


def take_rows(x: Array, rows: Int[Array, " n"], fill: int = 0) -> Array:
    """Gathers rows of x by their indices; `fill` for indices past the last."""
    return x.at[rows].get(mode="fill", fill_value=fill)


def _set_indices(mask: Bool[Array, " n"], size: int) -> Int[Array, " size"]:
    """Returns the indices at which a mask is set, in order, padded with n: `jnp.nonzero` with a static size."""
    # Each set index is scattered to its rank among the set ones; unset ones to `size`, where they are dropped.
    position = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    empty = varying_like(jnp.full(size, mask.size, jnp.int32), mask)
    return empty.at[position].set(jnp.arange(mask.size, dtype=jnp.int32), mode="drop", unique_indices=True)


class _Route(NamedTuple):
    """Static sizes of an all-to-all."""

    axes: Axes
    most: int
    """Rows from one rank to another, at most."""
    sent: int
    """Rows that a rank sends, with padding."""
    received: int
    """Rows that a rank receives, with padding."""

    @property
    def reverse(self) -> "_Route":
        """The all-to-all that returns the received rows."""
        return self._replace(sent=self.received, received=self.sent)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(route: _Route, rows: Float[Array, "sent width"], sizes: Int[Array, "ranks ranks"]) -> Array:
    """Exchanges rows.

    Args:
      route: static sizes.
      rows: ordered by destination.
      sizes: [i, j]: number of rows from rank i to rank j.

    Returns:
      [received, width]: the received rows, ordered by source, padded with zeros.
    """
    rank = lax.axis_index(route.axes)
    sent, received = sizes[rank], sizes[:, rank]
    # As many rows as could come: shapes are static.
    empty = varying_like(jnp.zeros((route.received, rows.shape[1]), rows.dtype), rows)
    # The two branches pad alike, with zeros after the received rows, so that what follows is one program.
    if _has_ragged():
        # Send offsets and sizes, then this rank's offsets in the destinations' outputs, and receive sizes.
        offsets_and_sizes = (_starts(sent), sent, _starts(sizes)[rank], received)
        return lax.ragged_all_to_all(rows, empty, *offsets_and_sizes, axis_name=route.axes)
    # A plain all-to-all of [ranks, most, width], padded for each pair of ranks.
    number = jnp.arange(route.most)

    def indices_of(counts: Array, padding: int) -> Array:
        """[ranks, most]: indices of each rank's rows, padded."""
        return jnp.where(number < counts[:, None], _starts(counts)[:, None] + number, padding)

    padded = lax.all_to_all(take_rows(rows, indices_of(sent, route.sent)), route.axes, 0, 0)
    return empty.at[indices_of(received, route.received)].set(padded, mode="drop")


def _starts(counts: Int[Array, "n ..."]) -> Int[Array, "n ..."]:
    """Returns the offset of each of n consecutive groups of rows with these counts."""
    return jnp.cumsum(counts, 0, dtype=jnp.int32) - counts


def _has_ragged() -> bool:
    """Returns whether XLA has a ragged all-to-all for the mesh's devices."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform != "cpu"


def _send_forward(route: _Route, rows: Array, sizes: Array) -> tuple[Array, Array]:
    return _send(route, rows, sizes), sizes


def _send_backward(route: _Route, sizes: Array, gradient: Array) -> tuple[Array, None]:
    """Returns the gradient of each received row to its source: the transposed all-to-all."""
    return _send(route.reverse, gradient, sizes.T), None


_send.defvjp(_send_forward, _send_backward)
