"""Weights in a byte, int8 or FP8: symmetric quantization with a scale per output, by which the product is multiplied.

Products cast the 8-bit values to the type of their input: -127 to 127, and numbers of E4M3, are exact in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from mtjax.generate.matrix_product import matrix_product
from mtjax.sharding.axes import PartitionSpec, map_ranks
from mtjax.sharding.stored_weight import StoredWeight
from mtjax.sharding.vocab import VocabSpecs, local_rows

TYPES = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
"""By `--weights-dtype`: the type of the values, and the largest."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ByteMatrix(StoredWeight):
    """A matrix, as `values * scales`."""

    values: Int[Array, "..."] | Float[Array, "..."]
    """int8 or E4M3, in the shape and sharding of the matrix."""
    scales: Float[Array, "..."]
    """float32, in the shape of the output dimensions."""

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim

    def product(self, x: Float[Array, "..."], inputs: int, sharding: PartitionSpec) -> Float[Array, "..."]:
        """See `StoredWeight.product`."""
        # `models.project` multiplies by `scales` afterwards, on the output: there are fewer outputs than weights.
        return matrix_product(x, self.values.astype(x.dtype), inputs, sharding)

    def rows(self, specs: VocabSpecs, tokens: Int[Array, "batch seq"], dtype: jnp.dtype) -> Array:
        """See `StoredWeight.rows`."""

        def local(table_VH: ByteMatrix, tokens_BS: Array) -> Array:
            row, owned = local_rows(specs, tokens_BS, len(table_VH.values))
            # A row is an output of the tied logits, so its scale is that of the whole vector.
            vectors = table_VH.values[row].astype(jnp.float32) * table_VH.scales[row][..., None]
            return specs.sum_into_residual(jnp.where(owned[..., None], vectors, 0).astype(dtype))

        arguments = (ByteMatrix(specs.table, specs.bias), specs.tokens)  # pyright: ignore[reportArgumentType]
        return map_ranks(local, arguments, specs.hidden)(self, tokens)


def to_bytes(
    matrix: Float[Array, "..."],
    inputs: Sequence[int],
    kind: Literal["int8", "fp8"] = "int8",
    known: Float[Array, "..."] | None = None,
) -> ByteMatrix:
    """Quantizes a matrix to 8 bits: `values = matrix / scale`, rounded, with a `scale` for each output.

    The scale is `max |matrix| / 127` of int8, and `max |matrix| / 448` of fp8.

    Args:
      matrix: of any float type.
      inputs: the dimensions over which a product with it sums.
      kind: the type of the values, a key of `TYPES` with the largest.
      known: scales in the shape of the matrix, where it was quantized before.
    """
    axes, wide, (dtype, most) = tuple(inputs), matrix.astype(jnp.float32), TYPES[kind]
    if known is None:
        largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
        # An output whose weights are all 0 has scale 1, not 0 / 0.
        scales = jnp.where(largest > 0, largest / most, 1.0)
    else:
        # All inputs of an output have the same known scale; max only removes their dimensions.
        scales = known.max(axis=axes, keepdims=True).astype(jnp.float32)
    scaled = wide / scales
    # A cast to E4M3, which has no infinity, makes NaN of what rounds above 448; a cast to int8 would truncate, not
    # round.
    values = jnp.round(scaled) if kind == "int8" else jnp.clip(scaled, -most, most)
    return ByteMatrix(values.astype(dtype), scales.squeeze(axes))
