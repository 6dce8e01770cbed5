"""4-bit weights: a scale for each group of inputs of an output, by which weights are multiplied before the product."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.convert.grid import Grid, fitted_grid
from mtjax.errors import UserError
from mtjax.models.project import letters_of
from mtjax.sharding.stored_weight import StoredWeight
from mtjax.sharding.vocab import map_ranks


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
        row, inner, outer = letters_of(x.ndim - inputs, inputs, self.ndim - inputs)
        return jnp.einsum(f"{row}{inner},{inner}{outer}->{row}{outer}", x, self.matrix(x.dtype), out_sharding=sharding)

    def matrix(self, dtype: jax.typing.DTypeLike) -> Float[Array, "..."]:
        """Returns the matrix, in the sharding of the values."""

        def local(values: Array, scales: Array, zeros: Array | None) -> Array:
            # By groups; in the compute dtype the integers are exact, and their multiples are rounded.
            groups = values.reshape(len(scales), -1, *scales.shape[1:]).astype(dtype)
            if zeros is not None:
                groups = groups - zeros.astype(dtype)[:, None]
            return (groups * scales.astype(dtype)[:, None]).reshape(values.shape)

        return _by_rank(local, self.values, self.inputs, 2, jax.typeof(self.values).sharding.spec)(
            self.values, self.group_scales, self.zeros
        )


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

    def local(matrix: Array, scales: Array | None, zeros: Array | None) -> tuple[Array, ...]:
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
            first = [None if a is None else a.reshape(blocks.shape)[:, :1] for a in (scales, zeros)]
            # Values that were quantized elsewhere may use the whole range: zero points of 0 admit it.
            grid = Grid(first[0], jnp.zeros_like(first[0]) if first[1] is None else first[1], 4)
        values = grid.round(blocks, jnp).astype(jnp.int4).reshape(matrix.shape)
        return values, grid.scales[:, 0].astype(dtype), None if zeros is None and not zero_point else _int4(grid.zeros)

    sharding = jax.typeof(matrix).sharding.spec
    of_groups = _group_spec(sharding, inputs)
    outputs = (sharding, of_groups, of_groups)
    mapped = map_ranks(local, (sharding, sharding, sharding), outputs)
    return Int4Matrix(*mapped(matrix, *(known or (None, None))), inputs)


def _int4(zeros: Array) -> Array:
    return zeros[:, 0].astype(jnp.int4)


def _group_spec(sharding: PartitionSpec, inputs: int) -> PartitionSpec:
    """Returns the sharding of [groups, *outputs]: groups like the first dimension of the inputs."""
    assert not any(sharding[1:inputs]), sharding
    return PartitionSpec(sharding[0], *sharding[inputs:])


def _by_rank(local: Callable[..., Any], values: Array, inputs: int, count: int, outputs: Any) -> Callable[..., Any]:
    """Maps a function of values and `count` arrays of groups over ranks."""
    sharding = jax.typeof(values).sharding.spec
    return map_ranks(local, (sharding, *[_group_spec(sharding, inputs)] * count), outputs)
