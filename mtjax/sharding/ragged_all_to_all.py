"""Rows that go to other ranks, as many to each as are meant for it.

How many these are is known when a program runs; the arrays that hold them have room for the most there can be. On GPUs
a ragged all-to-all sends the rows alone. XLA for CPUs has none: there an all-to-all sends all of the room.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from mtjax.sharding.axes import varying_like
from mtjax.theory.rules import Axes


class RaggedRouting(NamedTuple):
    """Which rows of every rank go to which rank, each once at most; the same sizes on all ranks."""

    axes: Axes
    """Over which the ranks lie."""
    sizes: Int[Array, "ranks ranks"]
    """How many rows go from which rank to which."""
    leaving: Int[Array, " leaving"]
    """This rank's rows by the ranks that they go to, a row as often as there are such; at the end a number behind the
    last row."""
    arriving: Int[Array, " arriving"]
    """Of all ranks' rows, one rank's after the other's, those that come here; at the end a number behind the last."""
    rows: int
    """Of each rank."""

    @classmethod
    def of(cls, goes: Bool[Array, "ranks rows ranks"], most: int, axes: Axes) -> "RaggedRouting":
        """A trip by which row of which rank goes to which rank, each to so many of them at most."""
        ranks, rows, me = goes.shape[0], goes.shape[1], lax.axis_index(axes)
        own = lax.dynamic_index_in_dim(goes, me, 0, keepdims=False).T
        here = lax.dynamic_index_in_dim(goes, me, 2, keepdims=False)
        leaving = _numbers(own.reshape(-1), rows * most)
        leaving = jnp.where(leaving < ranks * rows, leaving % rows, rows)
        return cls(axes, goes.sum(1, dtype=jnp.int32), leaving, _numbers(here.reshape(-1), ranks * rows), rows)

    @property
    def _route(self) -> "_Route":
        return _Route(self.axes, self.rows, len(self.leaving), len(self.arriving))

    def dispatch(self, x: Float[Array, "rows width"]) -> Float[Array, "arriving width"]:
        """What arrives when every rank sends its rows x; zeros behind it."""
        return _send(self._route, take_rows(x, self.leaving), self.sizes)

    def combine(self, y: Float[Array, "arriving width"]) -> Float[Array, "rows width"]:
        """What is made of what has arrived goes home, and is added up there for each row, in float32."""
        home = jnp.asarray(_send(self._route.back, y, self.sizes.T), jnp.float32)
        total = varying_like(jnp.zeros((self.rows, y.shape[1]), jnp.float32), home)
        return total.at[self.leaving].add(home, mode="drop")


def take_rows(x: Array, rows: Int[Array, " n"], fill: int = 0) -> Array:
    """Rows of x by their numbers; `fill` for numbers behind the last."""
    return x.at[rows].get(mode="fill", fill_value=fill)


def _numbers(mask: Bool[Array, " n"], size: int) -> Int[Array, " size"]:
    """Where a mask is set, in order; n behind the last such place."""
    place = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    empty = varying_like(jnp.full(size, mask.size, jnp.int32), mask)
    return empty.at[place].set(jnp.arange(mask.size, dtype=jnp.int32), mode="drop", unique_indices=True)


class _Route(NamedTuple):
    axes: Axes
    most: int
    """Rows from one rank to another."""
    leaving: int
    """Rows of what leaves, with room."""
    arriving: int
    """Rows of what arrives, with room."""

    @property
    def back(self) -> "_Route":
        """The same way home."""
        return self._replace(leaving=self.arriving, arriving=self.leaving)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(route: _Route, rows: Float[Array, "leaving width"], sizes: Int[Array, "ranks ranks"]) -> Array:
    """Rows by the ranks that they go to -> those that arrive by the ranks that they come from, and zeros."""
    me = lax.axis_index(route.axes)
    leaving, arriving = sizes[me], sizes[:, me]
    empty = varying_like(jnp.zeros((route.arriving, rows.shape[1]), rows.dtype), rows)
    if _has_ragged():
        places = (_starts(leaving), leaving, _starts(sizes)[me], arriving)
        return lax.ragged_all_to_all(rows, empty, *places, axis_name=route.axes)
    number = jnp.arange(route.most)

    def places_of(counts: Array, behind: int) -> Array:
        """Of every rank's rows, `most` for each."""
        return jnp.where(number < counts[:, None], _starts(counts)[:, None] + number, behind)

    padded = lax.all_to_all(take_rows(rows, places_of(leaving, route.leaving)), route.axes, 0, 0)
    return empty.at[places_of(arriving, route.arriving)].set(padded, mode="drop")


def _starts(counts: Int[Array, "n ..."]) -> Int[Array, "n ..."]:
    """Where each begins that has so many rows, one behind the other."""
    return jnp.cumsum(counts, 0, dtype=jnp.int32) - counts


def _has_ragged() -> bool:
    """Whether the mesh's devices exchange rows by their number."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform != "cpu"


def _send_forward(route: _Route, rows: Array, sizes: Array) -> tuple[Array, Array]:
    return _send(route, rows, sizes), sizes


def _send_backward(route: _Route, sizes: Array, gradient: Array) -> tuple[Array, None]:
    """Gradients go the same way back."""
    return _send(route.back, gradient, sizes.T), None


_send.defvjp(_send_forward, _send_backward)
