"""Products with matrices that are not differentiated."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.models.project import einsum_letters
from mtjax.sharding.axes import PartitionSpec


def matrix_product(
    x: Float[Array, "..."], matrix: Float[Array, "..."], inputs: int, sharding: PartitionSpec
) -> Float[Array, "..."]:
    """Computes `x W` over the last `inputs` dimensions of x, in `sharding`, where nothing is differentiated."""
    # `models.project` has the product that is differentiated, whose weight may still have to be gathered.
    row, inner, outer = einsum_letters(x.ndim - inputs, inputs, matrix.ndim - inputs)
    return jnp.einsum(f"{row}{inner},{inner}{outer}->{row}{outer}", x, matrix, out_sharding=sharding)
