"""8-bit weights: symmetric quantization with a scale per output, by which the product is multiplied.

Products cast the 8-bit values to the type of their input: -127 to 127 are exact in bfloat16.
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
    """int8, in the shape and sharding of the matrix."""
    scales: Float[Array, "..."]
    """float32, in the shape of the output dimensions."""

    def __getitem__(self, key: object) -> "Int8Matrix":
        """Returns itself for `[...]`, by which `nnx.Variable` is read."""
        assert key is Ellipsis
        return self

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim


def to_int8(matrix: Float[Array, "..."], inputs: Sequence[int]) -> Int8Matrix:
    """Quantizes a matrix to 8 bits: `values = round(matrix / scale)`, `scale = max |matrix| / 127` per output.

    Args:
      matrix: of any float type.
      inputs: the dimensions over which a product with it sums.
    """
    matrix_float32 = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(matrix_float32), axis=tuple(inputs), keepdims=True)
    # An output whose weights are all 0 has scale 1, not 0 / 0.
    scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    return Int8Matrix(jnp.round(matrix_float32 / scales).astype(jnp.int8), scales.squeeze(tuple(inputs)))
