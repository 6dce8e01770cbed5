"""Rounding of weights to integers with scales, of output channels or groups of inputs; with or without zero points."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Grid:
    """The values that quantized weights may have: `(q - zeros) * scales` for integers q of `bits` bits."""

    scales: Any
    """Broadcasts with the weights; above 0."""
    zeros: Any
    """Integers, broadcasts with the weights; None if all are 0."""
    bits: int

    @property
    def least(self) -> int:
        """The least integer; without zero points, its negative is the greatest, so that the grid is symmetric."""
        return -(2 ** (self.bits - 1)) + (self.zeros is None)

    def round(self, weights: Any, xp: Any = np) -> Any:
        """Returns the integers of the nearest values, as floats."""
        shifted = xp.round(weights / self.scales) + (0 if self.zeros is None else self.zeros)
        return xp.clip(shifted, self.least, 2 ** (self.bits - 1) - 1)

    def values(self, integers: Any) -> Any:
        """Returns the weights of integers."""
        return (integers if self.zeros is None else integers - self.zeros) * self.scales


def fitted_grid(
    weights: Any, axis: int | tuple[int, ...], bits: int, dtype: Any, *, zero_point: bool = False, xp: Any = np
) -> Grid:
    """Returns the grid from the least to the greatest of the weights that share a scale.

    Args:
      weights: float32.
      axis: the dimensions whose weights share a scale; they have size 1 in the grid.
      bits: of an integer.
      dtype: in which scales are stored: weights are rounded to multiples of the stored scales.
      zero_point: whether the grid need not be symmetric; it always has the value 0.
      xp: numpy or jax.numpy.
    """
    greatest = 2 ** (bits - 1) - 1
    if zero_point:
        # With 0 in the range, so that weights of 0 stay 0.
        low = xp.minimum(weights.min(axis=axis, keepdims=True), 0)
        high = xp.maximum(weights.max(axis=axis, keepdims=True), 0)
        width = (high - low) / (2 * greatest + 1)
    else:
        width, low = xp.abs(weights).max(axis=axis, keepdims=True) / greatest, None
    # As stored: weights are rounded to multiples of the scale that a reader multiplies by.
    scales = width.astype(dtype).astype(np.float32)
    # Weights that are all 0, or whose scale is too small for its type, have scale 1, not 0 / 0.
    scales = xp.where(scales > 0, scales, 1).astype(np.float32)
    zeros = None if low is None else xp.clip(xp.round(-low / scales) - greatest - 1, -greatest - 1, greatest)
    return Grid(scales, zeros, bits)
