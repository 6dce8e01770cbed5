"""The product of two matrices in 8-bit floats with a scale for each row and each column, and its gradients.

Each row of the left operand and each column of the right one is multiplied by its own scale before it is rounded. As
gradients are products over other dimensions, operands are rounded once for each product that reads them: the weight by
outputs forward, and by inputs backward.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import merge_both
from mtjax.sharding.float8 import E4M3, Recipe, quantized
from mtjax.sharding.float8_scales import fitting_scale, inverse_of


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def rowwise_product(recipe: Recipe, dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Array) -> Array:
    """Computes `x W` of x rounded row by row and W rounded column by column; arguments as of `float8_product`."""
    row, inner, outer = dims
    kinds, result = (E4M3, E4M3), f"{row}{outer}"
    formula, digits = (f"{row}{inner}", f"{inner}{outer}", result), recipe.digits
    return _product(formula, x, weight, kinds, digits, sharding, lax.Precision.DEFAULT)


def _forward(
    recipe: Recipe, dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Array
) -> tuple[Array, tuple[Array, Array]]:
    return rowwise_product(recipe, dims, sharding, x, weight), (x, weight)


def _backward(
    recipe: Recipe, dims: tuple[str, ...], _: PartitionSpec, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """Computes `dx = g W'` and `dW = x' g`, each of operands that are rounded for it."""
    (row, inner, outer), (x, weight), kind = dims, saved, recipe.gradient_type
    x_spec, weight_spec = (jax.typeof(a).sharding.spec for a in saved)
    merged, g, flat = merge_both(outer, (gradient, len(row)), (weight, len(inner)))
    # HIGHEST: as in `mtjax.sharding.float8`.
    formula = (f"{row}{merged}", f"{inner}{merged}", f"{row}{inner}")
    x_gradient = _product(formula, g, flat, (kind, E4M3), recipe.digits, x_spec, lax.Precision.HIGHEST)
    inner, x, flat = merge_both(inner, (x, len(row)), (flat, 0))
    row, x, g = merge_both(row, (x, 0), (g, 0))
    formula, merged_spec = (f"{row}{inner}", f"{row}{merged}", f"{inner}{merged}"), jax.typeof(flat).sharding.spec
    weight_gradient = _product(formula, x, g, (E4M3, kind), recipe.digits, merged_spec, lax.Precision.HIGHEST)
    return x_gradient, weight_gradient.reshape(weight.shape, out_sharding=weight_spec)


rowwise_product.defvjp(_forward, _backward)


def _product(
    formula: tuple[str, str, str],
    a: Array,
    b: Array,
    kinds: tuple[Any, Any],
    digits: int,
    sharding: PartitionSpec,
    precision: lax.Precision,
) -> Array:
    """Computes einsum(a, b) of operands that are rounded to 8 bits, with a scale for each of their other indices.

    Args:
      formula: letters of a, of b and of the result.
      a: in the type of the result.
      b: likewise.
      kinds: 8-bit types of a and b.
      digits: of inverse scales.
      sharding: of the result.
      precision: of the sum.
    """
    contracted = set(formula[0]) & set(formula[1])
    operands, inverses = [], []
    for letters, array, kind in zip(formula, (a, b), kinds, strict=False):
        along = tuple(i for i, letter in enumerate(letters) if letter in contracted)
        scale = fitting_scale(jnp.max(jnp.abs(array), axis=along, keepdims=True), kind, digits)
        # XLA: it recognizes the pair of casts as an operand of 8 bits.
        operands.append(quantized(array, kind, scale).astype(a.dtype))
        inverses.append(inverse_of(scale.squeeze(along)))
    # With more digits than one, products of the result and two scales are rounded once, from float32.
    wide = a.dtype if digits == 1 else jnp.float32
    result = jnp.einsum(
        f"{formula[0]},{formula[1]}->{formula[2]}",
        *operands,
        out_sharding=sharding,
        precision=precision,
        preferred_element_type=wide,
    )
    # XLA: with scales of rows on an operand it would be a matmul in 16 bits, as cuBLASLt's has one for each operand.
    # Behind the matmul powers of two are as exact, as they change no digits.
    rows, columns = (inverse.astype(wide) for inverse in inverses)
    return (result * jnp.expand_dims(rows, tuple(range(rows.ndim, result.ndim))) * columns).astype(a.dtype)
