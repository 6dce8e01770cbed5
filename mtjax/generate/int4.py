"""4-bit weights: a scale for each group of inputs of an output, by which weights are multiplied before the product."""

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.errors import UserError
from mtjax.generate.matrix_product import matrix_product
from mtjax.models.weight_grid import Grid, fitted_grid
from mtjax.sharding.axes import PartitionSpec, dimension_axes, map_ranks
from mtjax.sharding.stored_weight import StoredWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4Matrix(StoredWeight):
    """A matrix [*inputs, *outputs], as `(values - zeros) * group_scales`."""

    # XLA: stores two elements of this type in a byte, in the arguments of programs as in files.
    values: Int[Array, "..."]
    """int4, in the shape and sharding of the matrix."""
    group_scales: Float[Array, "groups ..."]
    """[groups, *outputs] in the compute dtype; the groups of a rank are those of its inputs."""
    zeros: Int[Array, "groups ..."] | None
    """int4, like the scales; None if all are 0."""
    inputs: int = field(metadata={"static": True})
    """Number of the dimensions of inputs."""

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim

    def product(self, x: Float[Array, "..."], inputs: int, sharding: PartitionSpec) -> Float[Array, "..."]:
        """See `StoredWeight.product`."""
        rows, groups = math.prod(x.shape[: x.ndim - inputs]), len(self.group_scales)
        # A product for each group needs memory for `rows` numbers of 4 bytes, a matrix for the group's numbers of the
        # compute dtype.
        if 4 * rows * groups < x.dtype.itemsize * math.prod(x.shape[x.ndim - inputs :]):
            return reshard(self._product_by_groups(x), sharding)
        return matrix_product(x, self.matrix(x.dtype), inputs, sharding)

    def _product_by_groups(self, x: Array) -> Array:
        """Computes the product of few rows: groups' products are multiplied by their scales and added in float32."""
        # XLA: on GPUs one kernel reads the 4-bit values; multiplied by their scales before the product, they would be
        # written to memory in 16 bits. A rank adds its groups, so that what is reduced is in the compute dtype.
        rows, weight = jax.typeof(x).sharding.spec[: x.ndim - self.inputs], jax.typeof(self.values).sharding.spec
        # A row-parallel matrix: each rank has some of the inputs, and adds its groups' products before ranks add
        # theirs.
        axes = dimension_axes(weight, 0)

        def local(x: Array, values: Array, scales: Array, zeros: Array | None) -> Array:
            flat = x.reshape(-1, len(scales), math.prod(values.shape[: self.inputs]) // len(scales))
            matrix = values.reshape(len(scales), flat.shape[2], -1).astype(x.dtype)
            # Integers from -8 to 7 are exact in the compute dtype; scales come after the sum over a group, in float32.
            products = jnp.einsum("rgi,gio->rgo", flat, matrix, preferred_element_type=jnp.float32)
            if zeros is not None:
                # XLA: a kernel does not subtract them from the values that it reads.
                sums = flat.sum(2, dtype=jnp.float32)[..., None]
                products = products - sums * zeros.astype(jnp.float32).reshape(len(scales), -1)
            scaled = products * scales.astype(jnp.float32).reshape(len(scales), -1)
            product = scaled.sum(1).astype(x.dtype).reshape(*x.shape[: x.ndim - self.inputs], *scales.shape[1:])
            return lax.psum(product, axes) if axes else product

        of_groups = _group_spec(weight, self.inputs)
        arguments = (PartitionSpec(*rows, *weight[: self.inputs]), weight, of_groups, of_groups)
        mapped = map_ranks(local, arguments, PartitionSpec(*rows, *weight[self.inputs :]))
        return mapped(x, self.values, self.group_scales, self.zeros)

    def matrix(self, dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
        """Returns the matrix, in the sharding of the values."""

        def local(values: Array, scales: Array, zeros: Array | None) -> Array:
            # Group by group: in the compute dtype the integers are exact; their products with scales are rounded.
            groups = values.reshape(len(scales), -1, *scales.shape[1:]).astype(dtype)
            if zeros is not None:
                groups = groups - zeros.astype(dtype)[:, None]
            return (groups * scales.astype(dtype)[:, None]).reshape(values.shape)

        sharding = jax.typeof(self.values).sharding.spec
        of_groups = _group_spec(sharding, self.inputs)
        mapped = map_ranks(local, (sharding, of_groups, of_groups), sharding)
        return mapped(self.values, self.group_scales, self.zeros)


def to_int4(
    matrix: Float[Array, "..."],
    inputs: int,
    group: int,
    dtype: jax.typing.DTypeLike,
    *,
    zero_point: bool = False,
    known: tuple[Array, Array | None] | None = None,
) -> Int4Matrix:
    """Quantizes a matrix to 4 bits, each value to the nearest of its group's grid.

    Args:
      matrix: of any float type; its first `inputs` dimensions are summed by products with it.
      inputs: their number.
      group: consecutive inputs that share a scale.
      dtype: of the scales.
      zero_point: whether groups have zero points.
      known: scales and zero points of groups, in the shape of the matrix, where it was quantized before: its values
        are on these grids; they are fitted when None.

    Raises:
      UserError: the group does not divide a rank's inputs.
    """

    def local(matrix: Array, scales: Array | None, zeros: Array | None) -> tuple[Array, Array, Array | None]:
        rows = math.prod(matrix.shape[:inputs])
        if rows % group:
            raise UserError(
                f"--weights-group is {group}, and a device has {rows} inputs of a matrix, which it does not divide: "
                f"use {math.gcd(group, rows)}, or another divisor of {rows}"
            )
        blocks = matrix.astype(jnp.float32).reshape(-1, group, *matrix.shape[inputs:])
        if scales is None:
            grid = fitted_grid(blocks, 1, 4, dtype, zero_point=zero_point, xp=jnp)
        else:
            # Values that were quantized elsewhere may use the whole range: zero points of 0 admit it.
            zeros_of_all = jnp.zeros_like(scales) if zeros is None else zeros
            # Known scales are given for every weight; those of a group are equal.
            grid = Grid(*(a.reshape(blocks.shape)[:, :1] for a in (scales, zeros_of_all)), bits=4)
        values = grid.round(blocks, jnp).astype(jnp.int4).reshape(matrix.shape)
        return values, grid.scales[:, 0].astype(dtype), grid.zeros[:, 0].astype(jnp.int4) if zero_point else None

    sharding = jax.typeof(matrix).sharding.spec
    of_groups = _group_spec(sharding, inputs)
    outputs = (sharding, of_groups, of_groups)
    mapped = map_ranks(local, (sharding, sharding, sharding), outputs)
    values, scales, zeros = mapped(matrix, *(known or (None, None)))
    return Int4Matrix(values, scales, zeros, inputs)


def _group_spec(sharding: PartitionSpec, inputs: int) -> PartitionSpec:
    """Returns the sharding of [groups, *outputs]: groups like the first dimension of the inputs."""
    # Groups are consecutive in the flattened inputs: with a later dimension sharded, a rank's would not be consecutive.
    assert not any(sharding[1:inputs]), sharding
    return PartitionSpec(sharding[0], *sharding[inputs:])
