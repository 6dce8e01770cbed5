"""Orthogonalizes stacks of matrices that are sharded over the mesh: the update of Muon.

A rank that holds a shard of every matrix of a stack first exchanges it for entire matrices of some layers (an
all-to-all over each mesh axis that shards rows or columns), orthogonalizes those, and sends the results back. So ranks
share the work, and a step sends each element twice, once each way.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from mtjax.layout.optimizer_states import ITERATIONS, MatrixDims, matrices_of
from mtjax.layout.rules import Axes
from mtjax.sharding.axes import dimension_axes, map_shards
from mtjax.sharding.param_specs import ParamSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the iteration's polynomial (Jordan et al. 2024): steep at 0, and within 0.7 and 1.2 after five iterations."""
EPSILON = 1e-8
"""Added to the norm by which a matrix is divided."""
ELEMENTS_AT_A_TIME = 2**25
"""Small matrices are multiplied in batches of up to this many elements, large ones one at a time: products of a whole
stack would need several times its memory."""


def orthogonalize(momentum: Array, record: ParamSpec, dtype: Any) -> Array:
    """Replaces the singular values of each matrix by values near 1, by Newton-Schulz iterations.

    Args:
      momentum: stacked matrices [..., rows, columns] in any order of dimensions, float32, sharded as stored.
      record: of the parameter, whose dimensions' names tell what is a matrix.
      dtype: type of the exchange and of the products.

    Returns:
      Of the shape, type and sharding of `momentum`.
    """
    matrices = matrices_of(record.logical_axes)
    assert matrices is not None, record.name
    spec = record.storage_spec

    def local(shard: Array) -> Array:
        """Orthogonalizes the matrices of which this rank has a shard; returns its shard of the results."""
        # Matrices last, so that an exchange splits the first dimension and joins one of the matrix's.
        order = (*matrices.stacked, *matrices.rows, *matrices.columns)
        turned = shard.astype(dtype).transpose(order)
        exchanges = [
            (1 + i - len(matrices.stacked), dimension_axes(spec, dim))
            for i, dim in enumerate(order)
            if i >= len(matrices.stacked) and dimension_axes(spec, dim)
        ]
        result = _in_entire_matrices(turned, matrices, exchanges)
        back = tuple(order.index(dim) for dim in range(shard.ndim))
        return result.transpose(back).astype(shard.dtype)

    return map_shards(local, spec)(momentum)


def _in_entire_matrices(shard: Array, matrices: MatrixDims, exchanges: list[tuple[int, Axes]]) -> Array:
    """Exchanges shards [stacked dimensions, rows' and columns'] for entire matrices, and back; `exchanges` are, of each
    sharded dimension, its index after one dimension of matrices, and the mesh axes."""
    stacked = len(matrices.stacked)
    x = shard.reshape(-1, *shard.shape[stacked:])
    count = x.shape[0]
    # Each exchange divides the matrices by its ranks, so that their number must be a multiple of all.
    ranks = math.prod(lax.axis_size(axes) for _, axes in exchanges)
    missing = -count % ranks  # zeros, which stay zeros
    x = jnp.pad(x, [(0, missing), *((0, 0) for _ in x.shape[1:])]) if missing else x
    for dim, axes in exchanges:
        x = lax.all_to_all(x, axes, split_axis=0, concat_axis=dim, tiled=True)
    num_rows = len(matrices.rows)
    rows, columns = math.prod(x.shape[1 : 1 + num_rows]), math.prod(x.shape[1 + num_rows :])
    x = newton_schulz(x.reshape(-1, rows, columns)).reshape(x.shape)
    for dim, axes in reversed(exchanges):
        x = lax.all_to_all(x, axes, split_axis=dim, concat_axis=0, tiled=True)
    return x[:count].reshape(shard.shape)


def newton_schulz(x: Array) -> Array:
    """Orthogonalizes matrices [matrices, rows, columns], a few at a time."""
    at_once = max(1, ELEMENTS_AT_A_TIME // (x.shape[1] * x.shape[2]))
    # Groups of one size, as `lax.map` compiles one program.
    size = max(n for n in range(1, min(at_once, x.shape[0]) + 1) if x.shape[0] % n == 0)
    if size == x.shape[0]:
        return _iterate(x)
    groups = x.reshape(-1, size, *x.shape[1:])
    return lax.map(_iterate, groups).reshape(x.shape)


def _iterate(x: Array) -> Array:
    """Runs the iterations on matrices [matrices, rows, columns]."""
    is_tall = x.shape[1] > x.shape[2]
    # The smaller of the two Gram matrices.
    x = x.mT if is_tall else x
    # The Frobenius norm is at least the largest singular value: those of the quotient are at most 1, where the
    # iteration converges.
    norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum((1, 2), keepdims=True))
    x = (x / (norm + EPSILON)).astype(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if is_tall else x
