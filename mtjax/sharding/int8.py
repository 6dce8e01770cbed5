"""Matrices in 8 bits: symmetric, a scale for each output, which multiplies what the product has summed.

Products read the numbers as they are, in the type of their input: -127 to 127 are exact in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

LARGEST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Matrix:
    """A matrix, as `values * scales`."""

    values: Int[Array, "..."]
    """int8, in the shape of the matrix and placed like it."""
    scales: Float[Array, "..."]
    """float32, of the outputs."""

    def __getitem__(self, key: object) -> "Int8Matrix":
        """All of it: what a `nnx.Variable` is asked for."""
        assert key is Ellipsis
        return self

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim


def to_int8(matrix: Float[Array, "..."], inputs: Sequence[int]) -> Int8Matrix:
    """A matrix rounded to 8 bits.

    Args:
      matrix: of any float type.
      inputs: the dimensions over which a product with it sums.
    """
    wide = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=tuple(inputs), keepdims=True)
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Int8Matrix(jnp.round(wide / scales).astype(jnp.int8), scales.squeeze(tuple(inputs)))
