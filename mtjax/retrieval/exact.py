"""Exact search: products of all queries with all vectors, block by block, on the devices of a mesh."""

from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import parse_mesh
from mtjax.retrieval.vectors import Vectors
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.global_batch import global_batch
from mtjax.sharding.param_specs import batch_sharding

BLOCK = 1 << 16
"""Vectors of a block on each device."""
QUERIES = 1 << 12
"""Queries of a product: with a block it makes a matrix of 1 GiB."""
MARGIN = 8
"""More that are found in float32 than are wanted."""
RESCORED = 1 << 14
"""Distances that are computed in float64 at a time."""
KEPT_BYTES = 4 << 30
"""Vectors that stay on each device between searches, if they all fit."""


class ExactIndex:
    """Computes all distances, in float32, and those of the nearest again, in float64.

    Args:
      vectors: what is searched.
      devices: each has a share of each block.
      block: vectors of a block on each device.
    """

    def __init__(self, vectors: Vectors, devices: int = 1, block: int = BLOCK) -> None:
        self._vectors, self._devices = vectors, devices
        self._mesh = attach_devices(parse_mesh(f"{devices}x1"))
        self._sharding = batch_sharding(self._mesh, TENSOR.rules)
        # A small database has a small block.
        self._block = min(block, max(1 << (len(vectors) // self._devices).bit_length(), 8))

    def __len__(self) -> int:
        return len(self._vectors)

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """See `vectors.Index.search`."""
        blocks = [queries[at : at + QUERIES] for at in range(0, len(queries), QUERIES)]
        found = [self._ordered(block, self._search(block, count + MARGIN), count) for block in blocks]
        empty = np.empty((0, count), np.int64), np.empty((0, count), np.float32)
        rows, distances = zip(*found, strict=True) if found else ([empty[0]], [empty[1]])
        return np.concatenate(rows), np.concatenate(distances)

    def _ordered(self, queries: np.ndarray, rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Orders what was found by distances in float64."""
        distances = np.full(rows.shape, np.inf)
        step = max(1, RESCORED // rows.shape[1])
        for at in range(0, len(queries), step):
            some = rows[at : at + step]
            query, column = np.nonzero(some >= 0)
            vectors = self._vectors.take(some[query, column]).astype(np.float64)
            distances[at + query, column] = np.square(vectors - queries[at + query]).sum(axis=1)
        # By distance, and equal ones by row: neither mesh nor block decides, unless float32 does not distinguish more
        # than `MARGIN` from the last wanted one.
        order = np.lexsort((rows, distances), axis=1)[:, :count]
        rows, distances = (np.take_along_axis(each, order, axis=1) for each in (rows, distances))
        return rows, distances.astype(np.float32)

    def _search(self, queries: np.ndarray, count: int) -> np.ndarray:
        """Returns int64[queries, count], ordered by distances in float32."""
        # Numbers of queries are powers of two: few shapes to compile.
        padded = np.zeros((1 << max(len(queries) - 1, 0).bit_length(), queries.shape[1]), np.float16)
        padded[: len(queries)] = queries
        rows = np.full((len(queries), count), -1, np.int64)
        distances = np.full((len(queries), count), np.inf, np.float32)
        # A block may have fewer vectors than are wanted.
        taken = min(count, self._block)
        for first, block in self._on_devices():
            near, at = self._on_mesh(padded, block, taken)
            # Devices have consecutive shares of the block, so that rows ascend, and equal distances keep their order.
            share = first + np.arange(self._devices)[:, None, None] * self._block
            at = np.concatenate([rows, *(at.astype(np.int64) + share)[:, : len(queries)]], axis=1)
            near = np.concatenate([distances, *near[:, : len(queries)]], axis=1)
            # Block by block, so that memory holds one block's candidates beside the best so far.
            order = np.argsort(near, axis=1, kind="stable")[:, :count]
            rows, distances = (np.take_along_axis(each, order, axis=1) for each in (at, near))
        rows[np.isinf(distances)] = -1
        return rows

    def _on_mesh(self, queries: np.ndarray, block: Array, count: int) -> tuple[np.ndarray, np.ndarray]:
        with jax.set_mesh(self._mesh):
            near, at = _nearest(jnp.asarray(queries), block, count)
            return np.asarray(near), np.asarray(at)

    def _on_devices(self) -> Iterator[tuple[int, Array]]:
        """Yields blocks on the devices, float16[devices, block, width], and the number of the first row of each."""
        # float16 has 2 bytes. Vectors that fit stay on the devices: a server would send them for every few queries.
        if 2 * self._vectors.width * len(self._vectors) <= KEPT_BYTES * self._devices:
            yield from self._kept
        else:
            yield from self._uploaded()

    @cached_property
    def _kept(self) -> list[tuple[int, Array]]:
        return list(self._uploaded())

    def _uploaded(self) -> Iterator[tuple[int, Array]]:
        size = self._block * self._devices
        for first, block in self._vectors.blocks(size):
            # Zeros fill up: they are found by no query.
            padded = np.zeros((size, self._vectors.width), np.float16)
            padded[: len(block)] = block
            shares = padded.reshape(self._devices, self._block, -1)
            yield first, global_batch(self._sharding, {"vectors": shares}, self._devices)["vectors"]


@partial(jax.jit, static_argnames="count")
def _nearest(queries: Array, block: Array, count: int) -> Any:
    """Returns squared distances, float32[devices, queries, count], and the positions in each device's share."""
    queries, block = queries.astype(jnp.float32), block.astype(jnp.float32)
    # |q - v|^2 without the differences of all pairs.
    # XLA: without HIGHEST, GPUs multiply float32 in TF32, whose 10 bits of mantissa would order near vectors at random.
    products = jnp.einsum("qw,dbw->dqb", queries, block, precision=lax.Precision.HIGHEST)
    sizes = jnp.square(block).sum(-1)
    distances = jnp.square(queries).sum(-1)[None, :, None] - 2 * products + sizes[:, None]
    # Rounding may make the distance of equal vectors negative.
    distances = jnp.where(sizes[:, None] > 0, jnp.maximum(distances, 0.0), jnp.inf)
    near, at = lax.top_k(-distances, count)
    return -near, at
