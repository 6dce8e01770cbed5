"""Parameters and linear layers that name their dimensions.

Parameters are float32 and carry the names of their dimensions (`nnx.Param(value, axes=names)`); products run in the
type of their input.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.models.project import ProductRule, project
from mtjax.sharding.axes import spec


def scaled(x: Array, factor: float | np.ndarray) -> Array:
    """Multiplies by a factor, or by one for each element, in float32: a factor has no rounding of its own."""
    if isinstance(factor, float) and factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def normal(key: Array, sizes: Mapping[str, int], std: float) -> nnx.Param:
    """Draws a parameter from N(0, std), created as shards, with the same values on every mesh."""
    # `out_sharding` makes each device draw its shard. The values depend on the key and the index alone
    # (jax_threefry_partitionable), not on the mesh.
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(std * jax.random.normal(key, shape, out_sharding=spec(*names)), axes=names)


def constant(value: float, sizes: Mapping[str, int]) -> nnx.Param:
    """Builds a parameter filled with `value`."""
    # Sharded from the beginning, like drawn ones: a device never holds all of a large parameter.
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec(*names)), axes=names)


class Linear(nnx.Module):
    """`x W + b`, or `x W`, over named dimensions.

    Column-parallel where an output dimension is sharded, row-parallel where an input dimension is: then the partial
    products are all-reduced, or with sequence parallelism reduce-scattered.
    """

    rule: ProductRule | None = None
    """Of its product; see `project`."""
    adds_bias: bool = True
    """False where a layer adds the bias itself, to a sum of several products."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        std: float,
        bias: bool = True,
        sequence: str = "seq",
        key: Array,
    ) -> None:
        """Draws the parameters: weight [*inputs, *outputs] from N(0, std), bias 0."""
        self.num_inputs = len(inputs)
        self.sequence = sequence
        self.weight = normal(key, {**inputs, **outputs}, std)
        self.bias = constant(0.0, outputs) if bias else None

    def __call__(self, x: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        """Applies to [batch, seq, *inputs]; returns [batch, seq, *outputs] in the type of x."""
        # The names are the parameter's own, so that a product is sharded as its weight is.
        outputs = self.weight.get_metadata()["axes"][self.num_inputs :]
        bias = None if self.bias is None or not self.adds_bias else self.bias[...]
        return project(x, self.weight[...], bias, outputs, self.sequence, rule=self.rule)
