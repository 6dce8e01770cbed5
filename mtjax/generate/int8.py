"""8-bit weights: symmetric quantization with a scale per output, by which the product is multiplied.

Products cast the 8-bit values to the type of their input: -127 to 127 are exact in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.generate.matrix_product import matrix_product
from mtjax.sharding.axes import map_ranks
from mtjax.sharding.stored_weight import StoredWeight
from mtjax.sharding.vocab import VocabSpecs, local_rows

LARGEST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Matrix(StoredWeight):
    """A matrix, as `values * scales`."""

    values: Int[Array, "..."]
    """int8, in the shape and sharding of the matrix."""
    scales: Float[Array, "..."]
    """float32, in the shape of the output dimensions."""

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim

    def product(self, x: Float[Array, "..."], inputs: int, sharding: PartitionSpec) -> Float[Array, "..."]:
        """See `StoredWeight.product`."""
        return matrix_product(x, self.values.astype(x.dtype), inputs, sharding)

    def rows(self, specs: VocabSpecs, tokens: Int[Array, "batch seq"], dtype: jnp.dtype) -> Array:
        """See `StoredWeight.rows`."""

        def local(table_VH: Int8Matrix, tokens_BS: Array) -> Array:
            row, owned = local_rows(specs, tokens_BS, len(table_VH.values))
            vectors = table_VH.values[row] * table_VH.scales[row][..., None]
            return specs.sum_into_residual(jnp.where(owned[..., None], vectors, 0).astype(dtype))

        arguments = (Int8Matrix(specs.table, specs.bias), specs.tokens)  # pyright: ignore[reportArgumentType]
        return map_ranks(local, arguments, specs.hidden)(self, tokens)


def to_int8(matrix: Float[Array, "..."], inputs: Sequence[int], known: Float[Array, "..."] | None = None) -> Int8Matrix:
    """Quantizes a matrix to 8 bits: `values = round(matrix / scale)`, `scale = max |matrix| / 127` per output.

    Args:
      matrix: of any float type.
      inputs: the dimensions over which a product with it sums.
      known: scales in the shape of the matrix, where it was quantized before.
    """
    axes, wide = tuple(inputs), matrix.astype(jnp.float32)
    if known is None:
        largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
        # An output whose weights are all 0 has scale 1, not 0 / 0.
        scales = jnp.where(largest > 0, largest / LARGEST, 1.0)
    else:
        scales = known.max(axis=axes, keepdims=True).astype(jnp.float32)
    return Int8Matrix(jnp.round(wide / scales).astype(jnp.int8), scales.squeeze(axes))
