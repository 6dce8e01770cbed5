"""The parts that transformers share: linear layers that name their dimensions, layer norm, dropout.

Parameters are float32 and carry the names of their dimensions (`nnx.Param(value, axes=names)`); products run in the
type of their input.
"""

import string
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Key

from mtjax.models.threefry import random_bits
from mtjax.sharding.axes import spec


def normal(key: Array, sizes: Mapping[str, int], std: float) -> nnx.Param:
    """A parameter drawn from N(0, std), made where it will live, with the same values on every mesh."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(std * jax.random.normal(key, shape, out_sharding=spec(*names)), axes=names)


def constant(value: float, sizes: Mapping[str, int]) -> nnx.Param:
    """A parameter filled with `value`."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec(*names)), axes=names)


class Linear(nnx.Module):
    """`x W + b` over named dimensions.

    Column-parallel where an output dimension is split over the mesh, row-parallel where an input dimension is: then the
    partial products are summed over the mesh as they enter the residual stream.
    """

    def __init__(self, inputs: Mapping[str, int], outputs: Mapping[str, int], *, std: float, key: Array) -> None:
        self.num_inputs = len(inputs)
        self.weight = normal(key, {**inputs, **outputs}, std)
        self.bias = constant(0.0, outputs)

    def __call__(self, x: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        """Applies to [batch, seq, *inputs]; gives [batch, seq, *outputs] in the type of x."""
        weight = self.weight[...]
        letters = iter(string.ascii_lowercase)
        row = "".join(next(letters) for _ in range(x.ndim - self.num_inputs))
        inner, outer = (
            "".join(next(letters) for _ in range(n)) for n in (self.num_inputs, weight.ndim - self.num_inputs)
        )
        outputs = tuple(self.bias.get_metadata()["axes"])
        place = spec("batch", "act_seq" if outputs == ("embed",) else "seq", *outputs)
        product = jnp.einsum(
            f"{row}{inner},{inner}{outer}->{row}{outer}", x, weight.astype(x.dtype), out_sharding=place
        )
        # In float32, so that the bias' gradient is summed over tokens, and over the mesh, in float32.
        return (product.astype(jnp.float32) + self.bias[...]).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalises over `embed` in float32; gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.bias = constant(0.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normal * self.scale[...] + self.bias[...]).astype(self.dtype)


def dropout(x: Array, rate: float, keys: Key[Array, " batch"] | None, site: int, names: tuple[str, ...]) -> Array:
    """Zeroes a share `rate` of `x` and scales up the rest; nothing when `keys` is None or `rate` 0.

    Args:
      x: [batch, ...].
      rate: share that is dropped.
      keys: one per sample, so that what is dropped depends on the sample alone: not on the mesh, the microbatch size
        or the number of processes.
      site: distinguishes the dropouts that share `keys`.
      names: logical names of x's dimensions.
    """
    if keys is None or rate == 0:
        return x
    place = spec(*names[1:])

    def keep_sample(key: Array) -> Array:
        bits = random_bits(jax.random.fold_in(key, site), x.shape[1:], place)
        return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))

    keep = jax.vmap(keep_sample)(keys)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
