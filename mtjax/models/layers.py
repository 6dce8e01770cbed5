"""The parts that transformers share: linear layers that name their dimensions, norms, dropout.

Parameters are float32 and carry the names of their dimensions (`nnx.Param(value, axes=names)`); products run in the
type of their input.
"""

import string
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float, Key

from mtjax.config import Model
from mtjax.models.recompute import DROPOUT_MASK, PRODUCT
from mtjax.models.threefry import random_bits
from mtjax.sharding.axes import merge, spec, varying_like


def normal(key: Array, sizes: Mapping[str, int], std: float) -> nnx.Param:
    """A parameter drawn from N(0, std), made where it will live, with the same values on every mesh."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(std * jax.random.normal(key, shape, out_sharding=spec(*names)), axes=names)


def constant(value: float, sizes: Mapping[str, int]) -> nnx.Param:
    """A parameter filled with `value`."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec(*names)), axes=names)


class Linear(nnx.Module):
    """`x W + b`, or `x W`, over named dimensions.

    Column-parallel where an output dimension is split over the mesh, row-parallel where an input dimension is: then the
    partial products are summed over the mesh as they enter the residual stream.
    """

    def __init__(
        self, inputs: Mapping[str, int], outputs: Mapping[str, int], *, std: float, bias: bool = True, key: Array
    ) -> None:
        self.num_inputs = len(inputs)
        self.weight = normal(key, {**inputs, **outputs}, std)
        self.bias = constant(0.0, outputs) if bias else None

    def __call__(self, x: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        """Applies to [batch, seq, *inputs]; gives [batch, seq, *outputs] in the type of x."""
        outputs = self.weight.get_metadata()["axes"][self.num_inputs :]
        return project(x, self.weight[...], None if self.bias is None else self.bias[...], outputs)


def project(
    x: Float[Array, "batch seq ..."], weight: Array, bias: Array | None, outputs: Sequence[str | None]
) -> Float[Array, "batch seq ..."]:
    """`x W + b` in the type of x.

    Args:
      x: [batch, seq, *inputs].
      weight: [*inputs, *outputs].
      bias: [*outputs], if any.
      outputs: logical names; ("embed",) alone enters the residual stream.
    """
    letters = iter(string.ascii_lowercase)
    num_inputs = weight.ndim - len(outputs)
    row, inner, outer = (
        "".join(next(letters) for _ in range(n)) for n in (x.ndim - num_inputs, num_inputs, len(outputs))
    )
    place = spec("batch", "act_seq" if tuple(outputs) == ("embed",) else "seq", *outputs)
    product = _product((row, inner, outer), place, x, varying_like(weight.astype(x.dtype), x))
    product = checkpoint_name(product, PRODUCT)
    if bias is None:
        return product
    # In float32, so that the bias' gradient is summed over tokens, and over the mesh, in float32.
    return (product.astype(jnp.float32) + bias).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array) -> Array:
    """`x W` with x [row, inner] and W [inner, outer], each letter of `dims` a dimension.

    Autodiff would get the weight's gradient as the transpose of (gradient)' x, which XLA computes on CPUs in twice the
    time that x' (gradient) takes.
    """
    row, inner, outer = dims
    return jnp.einsum(f"{row}{inner},{inner}{outer}->{row}{outer}", x, weight, out_sharding=place)


def _product_forward(
    dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _product(dims, place, x, weight), (x, weight)


def _product_backward(
    dims: tuple[str, str, str], _: PartitionSpec, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    row, inner, outer = dims
    x, weight = saved
    here, there = (jax.typeof(a).sharding.spec for a in saved)
    # A row-parallel product's is split along the sequence. Gathered once for both products below: left to XLA, each may
    # gather it on its own, as they do where a microbatch is one sample.
    gradient = reshard(gradient, PartitionSpec(*here[: len(row)], *there[len(inner) :]))
    # Over several dimensions XLA would copy an operand into another order first, on CPUs.
    outer, gradient, weight = _merged(outer, (gradient, len(row)), (weight, len(inner)))
    x_gradient = jnp.einsum(f"{row}{outer},{inner}{outer}->{row}{inner}", gradient, weight, out_sharding=here)
    inner, x, weight = _merged(inner, (x, len(row)), (weight, 0))
    row, x, gradient = _merged(row, (x, 0), (gradient, 0))
    flat = jax.typeof(weight).sharding.spec
    weight_gradient = jnp.einsum(f"{row}{inner},{row}{outer}->{inner}{outer}", x, gradient, out_sharding=flat)
    return x_gradient, weight_gradient.reshape(saved[1].shape, out_sharding=there)


def _merged(dims: str, left: tuple[Array, int], right: tuple[Array, int]) -> tuple[str, Array, Array]:
    """Two arrays with the dimensions `dims`, each from a place on; they are made one where neither is split inside."""
    found = [merge(a, start, start + len(dims)) for a, start in (left, right)]
    if found[0] is None or found[1] is None:
        return dims, left[0], right[0]
    return dims[0], found[0], found[1]


_product.defvjp(_product_forward, _product_backward)


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


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over `embed`, in float32 (arXiv 1910.07467); gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        x = x.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...]).astype(self.dtype)


Norm = LayerNorm | RMSNorm

NORMS: Mapping[str, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """The norm that a model's settings name."""
    return NORMS[model.norm](model.hidden_size, model.norm_epsilon, dtype)


def dropout(
    x: Array,
    rate: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    kept_as: str = DROPOUT_MASK,
) -> Array:
    """Zeroes a share `rate` of `x` and scales up the rest; nothing when `keys` is None or `rate` 0.

    Args:
      x: [batch, ...].
      rate: share that is dropped.
      keys: one per sample, so that what is dropped depends on the sample alone: not on the mesh, the microbatch size
        or the number of processes.
      site: distinguishes the dropouts that share `keys`.
      names: logical names of x's dimensions.
      kept_as: name of the mask in `mtjax.models.recompute`.
    """
    if keys is None or rate == 0:
        return x
    place = spec(*names[1:])

    def keep_sample(key: Array) -> Array:
        bits = random_bits(jax.random.fold_in(key, site), x.shape[1:], place)
        return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))

    keep = checkpoint_name(jax.vmap(keep_sample)(keys), kept_as)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
