"""The product of two matrices in 8-bit floats, and its gradients: scales, rounding, and counts of largest values.

A tensor is multiplied by its scale (`mtjax.sharding.float8_scales`), so that its largest value just fits into the type,
and rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec, reshard
from jaxtyping import Float

from mtjax.sharding.axes import map_ranks, merge_both, spec, varying_like
from mtjax.sharding.float8_scales import fitting_scale, inverse_of, scale_index

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """How products are quantized."""

    is_delayed: bool
    """Whether scales are those of earlier steps' largest values, else of the tensors themselves."""
    gradient_type: Any = E5M2
    """Of the gradients of the products' outputs; all other operands are `E4M3`."""
    gathers: bool = False
    """Whether sequences are gathered in 8 bits, which needs scales that are known before. Sums remain in 16 bits."""
    by_rows: bool = False
    """Whether each row and column has a scale (`mtjax.sharding.float8_rows`)."""
    digits: int = 1
    """Binary digits of inverse scales: with one, scales are powers of two."""


@partial(jax.tree_util.register_dataclass, data_fields=["scale", "age"], meta_fields=[])
@dataclass(frozen=True)
class Scales:
    """What delayed scaling knows of a product's operands: x and g are activations and gradients of the output."""

    scale: Float[Array, "3"]
    """Of x, the weight and g."""
    age: Float[Array, "2 heads scales"]
    """Of x and g: steps since `scale_at(i)` was the scale that fits; its gradient counts who found which one. Each
    tensor parallel rank counts in its rows."""


@partial(jax.tree_util.register_dataclass, data_fields=["values", "carrier"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in 8 bits, quantized once for all products of a step; its gradient has more bits."""

    values: Any
    """[*inputs, *outputs], or stacked, [layers, ...]."""
    dtype: str
    """Type of the matrix without quantization, and so of its gradient."""
    carrier: Any = None
    """Zeros in the shape of the matrix that no product reads: their gradient is the matrix's. None in a stack."""

    def __getitem__(self, key: object) -> "QuantizedWeight":
        """Returns itself for `[...]`, by which `nnx.Variable` is read."""
        assert key is Ellipsis
        return self

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim

    def astype(self, dtype: jax.typing.DTypeLike) -> "QuantizedWeight":
        """Returns the matrix for products with gradients of this type."""
        return replace(self, carrier=self.carrier.astype(dtype))

    def with_carrier(self) -> "QuantizedWeight":
        """Returns the matrix with zeros to differentiate by."""
        values = lax.stop_gradient(self.values)
        zeros = jnp.zeros(values.shape, self.dtype, out_sharding=jax.typeof(values).sharding.spec)
        return replace(self, values=values, carrier=varying_like(zeros, values))

    def reduced(self, reduce: Callable[[Array, Array], Array], shard: Array) -> "QuantizedWeight":
        """Returns the matrix with zeros whose gradient `reduce` makes that of `shard`."""
        weight = self.with_carrier()
        return replace(weight, carrier=reduce(weight.carrier, shard))


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["spec"])
@dataclass(frozen=True)
class Placed:
    """The sharding of an array that is not saved."""

    spec: PartitionSpec


def current_scale(a: Array, kind: Any, digits: int) -> Float[Array, ""]:
    """Returns the scale that fits a tensor now: of all of its shards over explicit axes."""
    # A maximum over explicit axes is an all-reduce: delayed scaling, which knows its scales before, has none.
    return fitting_scale(jnp.max(jnp.abs(a)), kind, digits)


def quantized(a: Array, kind: Any, scale: Array) -> Array:
    """Rounds `a scale` to an 8-bit type; values beyond its largest become that, infinite ones NaN."""
    # An infinite value would become an ordinary one, and hide an overflow for which a step is skipped.
    wide, top = a.astype(jnp.float32), float(jnp.finfo(kind).max)
    # The difference of an infinite value from itself is NaN. A constant's broadcast would be hoisted out of the scan
    # over layers (`lax.scan`), and each kernel would read it from memory: 4 bytes an element.
    return jnp.where(jnp.isinf(a), wide - wide, jnp.clip(wide * scale, -top, top)).astype(kind)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def float8_product(
    recipe: Recipe,
    dims: tuple[str, ...],
    sharding: PartitionSpec,
    x: Array,
    weight: Array,
    scales: Scales | None,
    weight8: Array | None = None,
) -> Array:
    """Computes `x W` of quantized x and W; its gradients are products of these and the quantized gradient.

    Args:
      recipe: how.
      dims: (row, inner, outer), einsum letters: x is [row, inner] and W [inner, outer], each letter a dimension.
      sharding: of the result.
      x: activations.
      weight: in the type of x; with `weight8`, zeros that have W's gradient.
      scales: of delayed scaling; None without. The gradient of their `age` counts largest values; `scale` has none.
      weight8: W in 8 bits, with the scale of `scales`, where it exists before.
    """
    return _product_forward(recipe, dims, sharding, x, weight, scales, weight8)[0]


def _operands(
    recipe: Recipe,
    rows: int,
    sharding: PartitionSpec,
    x: Array,
    weight: Array,
    scales: Scales | None,
    weight8: Array | None,
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Returns x, gathered along the first `rows` dimensions where it is sharded more than the product, and W in 8 bits,
    and their scales."""
    of_both = [current_scale(a, E4M3, recipe.digits) for a in (x, weight)] if scales is None else scales.scale[:2]
    # Quantized before the gather: ranks send a byte an element.
    x8, x_spec = quantized(x, E4M3, of_both[0]), jax.typeof(x).sharding.spec
    if recipe.gathers and not any(x_spec[rows:]):  # column-parallel
        x8 = reshard(x8, PartitionSpec(*sharding[:rows], *x_spec[rows:]))
    weight8 = quantized(weight, E4M3, of_both[1]) if weight8 is None else weight8
    return x8, weight8, (of_both[0], of_both[1])


def _scaled(
    recipe: Recipe,
    formula: str,
    a: Array,
    b: Array,
    scales: tuple[Array, Array],
    dtype: Any,
    sharding: PartitionSpec,
    precision: lax.Precision = lax.Precision.DEFAULT,
) -> Array:
    """Computes einsum(a, b) of 8-bit operands, divided by both scales, in `dtype`."""
    # XLA: an 8-bit product of cuBLASLt. The scales stand on an operand: a factor of the product would stand between it
    # and the sum over ranks, which would then be an all-reduce where sequence parallelism needs a reduce-scatter.
    a, b = a.astype(dtype), b.astype(dtype)
    if recipe.digits == 1:
        a *= (1 / (scales[0] * scales[1])).astype(dtype)
    else:  # each its own: their product has more digits than the compute type
        a, b = (each * inverse_of(scale).astype(dtype) for each, scale in zip((a, b), scales, strict=True))
    return jnp.einsum(formula, a, b, out_sharding=sharding, precision=precision)


def _product_forward(
    recipe: Recipe,
    dims: tuple[str, ...],
    sharding: PartitionSpec,
    x: Array,
    weight: Array,
    scales: Scales | None,
    weight8: Array | None = None,
) -> tuple[Array, Any]:
    """Computes `x W`, [*rows, *outer], from 8-bit operands, which are what the backward pass reads."""
    row, inner, outer = dims
    x8, weight8, both = _operands(recipe, len(row), sharding, x, weight, scales, weight8)
    y = _scaled(recipe, f"{row}{inner},{inner}{outer}->{row}{outer}", x8, weight8, both, x.dtype, sharding)
    # The largest value of x is found in the backward pass, once: forward passes alone need none.
    counted = None if scales is None else x
    return y, (x8, weight8, both, scales, counted, Placed(jax.typeof(x).sharding.spec))


def _product_backward(
    recipe: Recipe, dims: tuple[str, ...], _: PartitionSpec, saved: Any, gradient: Array
) -> tuple[Array, Array, Scales | None, None]:
    """Computes `dx = g W'`, `dW = x' g` and counts of the largest values of x and g."""
    row, inner, outer = dims
    x8, weight8, (x_scale, weight_scale), scales, x, of_x = saved
    kind, dtype, precise = recipe.gradient_type, gradient.dtype, lax.Precision.HIGHEST
    x_spec, weight_spec = (jax.typeof(a).sharding.spec for a in (x8, weight8))
    counts = None
    if scales is not None:
        # The largest of each rank, in its own rows: one for all ranks would be an all-reduce for each product.
        counts = _counts(recipe, scales, _largest_of_ranks(x), _largest_of_parts(gradient, len(row)))
    # As in `mtjax.models.project`: gathered once along the sequence for both products, and dimensions merged.
    whole = PartitionSpec(*x_spec[: len(row)], *weight_spec[len(inner) :])
    # Where sequences are gathered in 8 bits it is gathered below, after its quantization.
    gradient = gradient if recipe.gathers else reshard(gradient, whole)
    scale = current_scale(gradient, kind, recipe.digits) if scales is None else scales.scale[2]
    g8 = reshard(quantized(gradient, kind, scale), whole)
    outer, g8, weight8 = merge_both(outer, (g8, len(row)), (weight8, len(inner)))
    formula = f"{row}{outer},{inner}{outer}->{row}{inner}"
    # HIGHEST: cuBLASLt adds in float32, instead of with the fewer bits that suffice forward, as in Transformer Engine.
    x_gradient = _scaled(recipe, formula, g8, weight8, (scale, weight_scale), dtype, of_x.spec, precise)
    # The weight's shape before its dimensions are merged.
    shape = saved[1].shape
    inner, x8, weight8 = merge_both(inner, (x8, len(row)), (weight8, 0))
    row, x8, g8 = merge_both(row, (x8, 0), (g8, 0))
    formula, merged_spec = f"{row}{inner},{row}{outer}->{inner}{outer}", jax.typeof(weight8).sharding.spec
    weight_gradient = _scaled(recipe, formula, x8, g8, (x_scale, scale), dtype, merged_spec, precise)
    weight_gradient = weight_gradient.reshape(shape, out_sharding=weight_spec)
    if of_x.spec != x_spec:
        # XLA: what reads the gradient of x, which is reduce-scattered, waits for both, so that the weight's gradient
        # is computed meanwhile. The scheduler would compute those of all of a layer's products while one of the sums
        # is sent, and wait for the others.
        x_gradient, weight_gradient = lax.optimization_barrier((x_gradient, weight_gradient))
    return x_gradient, weight_gradient, counts, None


float8_product.defvjp(_product_forward, _product_backward)


def _largest_of_ranks(a: Array) -> Float[Array, " ranks"]:
    """Returns the largest absolute value of each tensor parallel rank's part of an array, without communication."""

    def largest(part: Array) -> Array:
        return jnp.max(jnp.abs(part)).astype(jnp.float32)[None]

    return map_ranks(largest, (jax.typeof(a).sharding.spec,), spec("heads"))(a)


def _largest_of_parts(gradient: Array, dim: int) -> Float[Array, " ranks"]:
    """Returns `_largest_of_ranks` of a gradient; where its outputs are the two of a gated MLP, `dim`, of each."""
    if gradient.ndim <= dim + 1 or gradient.shape[dim] != 2 or jax.typeof(gradient).sharding.spec[dim] is not None:
        return _largest_of_ranks(gradient)
    # XLA: finds each where it is computed. Of both together it would read them once more.
    return jnp.maximum(*(_largest_of_ranks(lax.index_in_dim(gradient, i, dim, keepdims=False)) for i in range(2)))


def _counts(recipe: Recipe, scales: Scales, x_largest: Array, g_largest: Array) -> Scales:
    """Returns the gradient of `scales`: in each rank's rows, which scale its part of x, and of g, would fit."""

    def rows(largest: Array, kind: Any) -> Array:
        """Returns [heads, scales] from [ranks]; zeros where all values are."""
        count, index = scales.age.shape[-1], scale_index(largest, kind, recipe.digits)
        is_found = (jnp.arange(count) == index[:, None]) & (largest > 0)[:, None]
        repeats = scales.age.shape[1] // len(largest)
        sharding = PartitionSpec(jax.typeof(is_found).sharding.spec[0], None, None)
        shape = (len(largest), repeats, count)
        # The state has a row for each head, on every mesh: a rank with several heads fills all of their rows.
        every = lax.broadcast_in_dim(is_found.astype(jnp.float32), shape, (0, 2), out_sharding=sharding)
        return every.reshape(-1, count, out_sharding=PartitionSpec(sharding[0], None))

    counts = jnp.stack([rows(x_largest, E4M3), rows(g_largest, recipe.gradient_type)])
    return Scales(jnp.zeros_like(scales.scale), varying_like(counts, scales.age))
