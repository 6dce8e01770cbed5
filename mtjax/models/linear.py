"""Parameters and linear layers that name their dimensions.

Parameters are float32 and carry the names of their dimensions (`nnx.Param(value, axes=names)`); products run in the
type of their input.
"""

import functools
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float

from mtjax.models.recompute import PRODUCT
from mtjax.sharding.axes import is_split, merge, spec, varying_like

Activation = Callable[[Array], Array]


def normal(key: Array, sizes: Mapping[str, int], std: float) -> nnx.Param:
    """A parameter drawn from N(0, std), created where it will live, with the same values on every mesh."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(std * jax.random.normal(key, shape, out_sharding=spec(*names)), axes=names)


def constant(value: float, sizes: Mapping[str, int]) -> nnx.Param:
    """A parameter filled with `value`."""
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec(*names)), axes=names)


class Linear(nnx.Module):
    """`x W + b`, or `x W`, over named dimensions.

    Column-parallel where an output dimension is split over the mesh, row-parallel where an input dimension is: then the
    partial products are summed over the mesh.
    """

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
        self.num_inputs = len(inputs)
        self.sequence = sequence
        self.weight = normal(key, {**inputs, **outputs}, std)
        self.bias = constant(0.0, outputs) if bias else None

    def __call__(
        self, x: Float[Array, "batch seq ..."], activation: Activation | None = None, *, saved: bool = True
    ) -> Float[Array, "batch seq ..."]:
        """Applies to [batch, seq, *inputs]; gives [batch, seq, *outputs] in the type of x.

        Args:
          x: the inputs; with an activation, what it makes them from, which is saved for the backward pass.
          activation: applied to x first.
          saved: whether the result is saved; not where it goes into a layer with an activation alone.
        """
        outputs = self.weight.get_metadata()["axes"][self.num_inputs :]
        bias = None if self.bias is None else self.bias[...]
        y = project(x, self.weight[...], bias, outputs, self.sequence, activation)
        return checkpoint_name(y, PRODUCT) if saved else y


def project(
    x: Float[Array, "batch seq ..."],
    weight: Array,
    bias: Array | None,
    outputs: Sequence[str | None],
    sequence: str = "seq",
    activation: Activation | None = None,
) -> Float[Array, "batch seq ..."]:
    """`x W + b` in the type of x, or `activation(x) W + b`.

    Args:
      x: [batch, seq, *inputs], or what the activation makes it from.
      weight: [*inputs, *outputs].
      bias: [*outputs], if any.
      outputs: logical names.
      sequence: logical name of the result's sequence: "act_seq" where it enters the residual stream.
      activation: applied to x first.
    """
    letters = iter(string.ascii_lowercase)
    num_inputs = weight.ndim - len(outputs)
    row, inner, outer = ("".join(next(letters) for _ in range(n)) for n in (2, num_inputs, len(outputs)))
    place, weight = spec("batch", sequence, *outputs), varying_like(weight.astype(x.dtype), x)
    run: Any = _product if activation is None else partial(_activated, activation)
    product = run((row, inner, outer), place, x, weight)
    return product if bias is None else _with_bias(product, bias)


def project_apart(
    x: Float[Array, "batch seq embed"], weight: Array, bias: Array | None, outputs: Sequence[str]
) -> list[Float[Array, "batch seq ..."]]:
    """Several projections of `x`, whose weights are one parameter: `project` for each, and one cotangent of `x`.

    Each result is an array of its own. One product of all of them would have to be split, and joined for its backward
    pass: 6 times an array's bytes forward, and 6 backward.

    Args:
      x: [batch, seq, embed].
      weight: [embed, projections, *outputs].
      bias: [projections, *outputs], if any.
      outputs: logical names.
    """
    place = spec("batch", "seq", *outputs)
    run: Any = _products
    products = run(spec("batch", "seq", outputs[0]), x, varying_like(weight.astype(x.dtype), x))
    if bias is not None:
        products = [_with_bias(product, bias[i].reshape(-1)) for i, product in enumerate(products)]
    whole = (product.reshape(*x.shape[:2], *weight.shape[2:], out_sharding=place) for product in products)
    return [checkpoint_name(product, PRODUCT) for product in whole]


@jax.custom_vjp
def _with_bias(product: Array, bias: Array) -> Array:
    """The sum in the type of the product, which cuBLAS adds before it writes the product.

    The bias' gradient is summed over tokens, and over the mesh, in float32. Behind a barrier: ZeRO-3 gathers vectors in
    float32, and XLA would change the type first.
    """
    return product + lax.optimization_barrier(bias).astype(product.dtype)


def _with_bias_forward(product: Array, bias: Array) -> tuple[Array, Array]:
    return _with_bias(product, bias), bias


def _with_bias_backward(bias: Array, gradient: Array) -> tuple[Array, Array]:
    tokens = tuple(range(gradient.ndim - bias.ndim))
    return gradient, gradient.astype(jnp.float32).sum(tokens)


_with_bias.defvjp(_with_bias_forward, _with_bias_backward)


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
    x_spec, weight_spec = (jax.typeof(a).sharding.spec for a in saved)
    # A row-parallel product's is split along the sequence. Gathered once for both products below: left to XLA, each may
    # gather it on its own, as they do where a microbatch is one sample.
    gradient = reshard(gradient, PartitionSpec(*x_spec[: len(row)], *weight_spec[len(inner) :]))
    # Over several dimensions XLA would copy an operand into another order first, on CPUs.
    outer, gradient, weight = _merged(outer, (gradient, len(row)), (weight, len(inner)))
    x_gradient = jnp.einsum(f"{row}{outer},{inner}{outer}->{row}{inner}", gradient, weight, out_sharding=x_spec)
    inner, x, weight = _merged(inner, (x, len(row)), (weight, 0))
    row, x, gradient = _merged(row, (x, 0), (gradient, 0))
    merged_spec = jax.typeof(weight).sharding.spec
    weight_gradient = jnp.einsum(f"{row}{inner},{row}{outer}->{inner}{outer}", x, gradient, out_sharding=merged_spec)
    return x_gradient, weight_gradient.reshape(saved[1].shape, out_sharding=weight_spec)


def _merged(dims: str, left: tuple[Array, int], right: tuple[Array, int]) -> tuple[str, Array, Array]:
    """Merges the dimensions `dims`, which each of two arrays has from the given position on, into one.

    Nothing changes if an array is split along any but the first of them.
    """
    first, second = (merge(a, start, start + len(dims)) for a, start in (left, right))
    if first is None or second is None:
        return dims, left[0], right[0]
    return dims[0], first, second


_product.defvjp(_product_forward, _product_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _activated(
    activation: Activation, dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array
) -> Array:
    """`activation(x) W`.

    By itself autodiff would save x where the activation reads it, rounded by an operation of its own; cuBLAS then can't
    apply the activation before it writes x.
    """
    return _product(dims, place, activation(x), weight)


def _activated_forward(
    activation: Activation, dims: tuple[str, str, str], place: PartitionSpec, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _activated(activation, dims, place, x, weight), (checkpoint_name(x, PRODUCT), weight)


def _activated_backward(
    activation: Activation,
    dims: tuple[str, str, str],
    place: PartitionSpec,
    saved: tuple[Array, Array],
    gradient: Array,
) -> tuple[Array, Array]:
    x, weight = saved
    activated, pull = jax.vjp(activation, x)
    slope, weight_gradient = _product_backward(dims, place, (activated, weight), gradient)
    return pull(slope)[0], weight_gradient


_activated.defvjp(_activated_forward, _activated_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(place: PartitionSpec, x: Array, weight: Array) -> list[Array]:
    """`x W[:, i]` for each i: x [batch, seq, embed], W [embed, i, *outputs], results [batch, seq, outputs merged].

    Merged, so that a bias is a vector to cuBLAS.
    """
    return [jnp.einsum("bse,eo->bso", x, each, out_sharding=place) for each in _each(weight)]


def _each(weight: Array) -> list[Array]:
    """[embed, i, *outputs] -> of each i [embed, outputs merged], which only the first of them may split."""
    merged = merge(weight, 2, weight.ndim)
    assert merged is not None
    return [merged[:, i] for i in range(weight.shape[1])]


def _products_forward(place: PartitionSpec, x: Array, weight: Array) -> tuple[list[Array], tuple[Array, Array]]:
    return _products(place, x, weight), (x, weight)


def _products_backward(_: PartitionSpec, saved: tuple[Array, Array], gradients: list[Array]) -> tuple[Array, Array]:
    x, weight = saved
    if is_split(weight, 1):  # summed over ranks: once, not once for each projection
        merged = merge(weight, 2, weight.ndim)
        assert merged is not None
        joined = jnp.stack(gradients, axis=2)
        x_gradient, gradient = _product_backward(("bs", "e", "io"), PartitionSpec(), (x, merged), joined)
    else:
        rows = zip(_each(weight), gradients, strict=True)
        each = [_product_backward(("bs", "e", "o"), PartitionSpec(), (x, w), g) for w, g in rows]
        x_gradient = functools.reduce(jnp.add, (own for own, _ in each))
        gradient = jnp.stack([own for _, own in each], axis=1)
    return x_gradient, gradient.reshape(weight.shape, out_sharding=jax.typeof(weight).sharding.spec)


_products.defvjp(_products_forward, _products_backward)
