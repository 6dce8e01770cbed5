"""GPTQ (arXiv 2210.17323): weights are rounded one input after another, and the error of each is compensated by the
inputs that follow, weighted by how they correlate in calibration text."""

from typing import Any

import numpy as np

from mtjax.models.weight_grid import Grid, fitted_grid

DAMPING = 0.01
"""Share of the moments' mean that is added to each input's own (the paper's lambda)."""
BLOCK = 32
"""Inputs whose errors are compensated within the block at once, and after it together."""


def quantize(
    weight: np.ndarray, moments: np.ndarray, bits: int, group: int, dtype: Any, zero_point: bool
) -> tuple[np.ndarray, Grid]:
    """Quantizes a matrix, so that the error of its products with the calibration inputs is small.

    Args:
      weight: [outputs, inputs].
      moments: [inputs, inputs], the sum over tokens of the outer product of the inputs with themselves.
      bits: of an integer.
      group: consecutive inputs that share a scale, which is fitted when the first of them is reached.
      dtype: of scales.
      zero_point: whether groups have zero points.

    Returns:
      Integers [outputs, inputs], and the grid, [outputs, groups, 1].
    """
    # float64: the inverse of moments is badly conditioned where inputs correlate.
    weight, upper = weight.astype(np.float64), _inverse_root(moments.astype(np.float64))
    # Inputs first: what an input's error changes is contiguous.
    weight = np.ascontiguousarray(weight.T)
    integers, grids = np.empty_like(weight), []
    for start in range(0, len(weight), BLOCK):
        stop = min(start + BLOCK, len(weight))
        errors = np.empty((stop - start, weight.shape[1]))
        for i in range(start, stop):
            if i % group == 0:
                # The rest of the block was compensated already; what is after it, not yet for this block's errors.
                pending = weight[i : i + group].copy()
                if i + group > stop:
                    pending[stop - i :] -= upper[start:i, stop : i + group].T @ errors[: i - start]
                grids.append(fitted_grid(pending.astype(np.float32), 0, bits, dtype, zero_point=zero_point))
            integers[i] = grids[-1].round(weight[i : i + 1])[0]
            errors[i - start] = (weight[i] - grids[-1].values(integers[i : i + 1])[0]) / upper[i, i]
            # Only within the block; what is after it is compensated once a block, by one product of matrices (the
            # paper's lazy batch updates).
            weight[i + 1 : stop] -= upper[i, i + 1 : stop, None] * errors[i - start]
        weight[stop:] -= upper[start:stop, stop:].T @ errors
    scales, zeros = (
        np.concatenate(each).T[..., None] if each[0] is not None else None
        for each in ([grid.scales for grid in grids], [grid.zeros for grid in grids])
    )
    return integers.T, Grid(scales, zeros, bits)


def _inverse_root(moments: np.ndarray) -> np.ndarray:
    """Returns the upper triangular U with `U' U = (moments + damping)^-1`."""
    diagonal = np.einsum("ii->i", moments).copy()
    # An input that is always 0 has no error, whatever its weights.
    moments = moments + np.diag(np.where(diagonal > 0, 0, 1) + DAMPING * max(diagonal.mean(), 1e-30))
    return np.linalg.cholesky(np.linalg.inv(moments)).T
