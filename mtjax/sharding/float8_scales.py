"""Scales of 8-bit tensors: which one fits a largest value, numbered, as powers of two or with more digits.

The inverse of a scale is the largest value divided by the type's largest number, rounded up to a few binary digits.
With one digit scales are powers of two: a tensor has the same digits whatever its scale. With more, the largest value
uses more of the type's range. An inverse has at most the 8 digits of bfloat16, so it is exact in every compute type.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.config.float8 import EXPONENTS

LOWEST = -32
"""The smallest scale is 2^LOWEST, and the largest below 2^(LOWEST + EXPONENTS): of powers of two, the product of two
inverses is a normal number in bfloat16. Others are applied one after the other."""
_BITS = 23
"""Of a float32's mantissa."""
_SEVEN = 7 << (_BITS - 2)
"""The mantissa of 1.75, with which the largest numbers of both 8-bit types begin."""


def steps_of(digits: int) -> int:
    """Returns the number of scales from one power of two up to the next."""
    return 1 << (digits - 1)


def scale_index(largest: Float[Array, "..."], kind: jnp.dtype, digits: int = 1) -> Int[Array, "..."]:
    """Returns the number of the largest scale with which `largest` is still a number of an 8-bit type.

    Args:
      largest: absolute values; of 0 the scale is 1.
      kind: the type.
      digits: binary digits of inverse scales, at most 8.
    """
    bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32)
    exponent, top, steps = (bits >> _BITS) - 127, jnp.finfo(kind).maxexp - 1, steps_of(digits)
    mantissa = (bits & ((1 << _BITS) - 1)) | (1 << _BITS)
    is_above = mantissa > _SEVEN  # the inverse is above 2^(exponent - top), and else above half of it
    octave = exponent - top - 1 + is_above
    if digits == 1:
        inverse = octave + 1
    else:  # in integers: a division of floats is rounded, and on GPUs not always to nearest
        unit = jnp.where(is_above, _SEVEN >> (digits - 1), _SEVEN >> digits)
        inverse = octave * steps + (mantissa + unit - 1) // unit - steps
    index = jnp.clip(-inverse, LOWEST * steps, (LOWEST + EXPONENTS) * steps - 1) - LOWEST * steps
    # Index of the scale 1.
    return jnp.where(largest == 0, -LOWEST * steps, index)


def scale_at(index: Int[Array, "..."], digits: int = 1) -> Float[Array, "..."]:
    """Returns the float32 scale of a number."""
    steps = steps_of(digits)
    if digits == 1:
        return lax.bitcast_convert_type((index.astype(jnp.int32) + (LOWEST + 127)) << _BITS, jnp.float32)
    bits = (127 << _BITS) - ((index.astype(jnp.int32) + LOWEST * steps) << (_BITS + 1 - digits))
    return 1 / lax.bitcast_convert_type(bits, jnp.float32)


def inverse_of(scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the inverse of a scale, which has at most 8 digits; those that float32 has rounded are dropped."""
    return lax.reduce_precision(1 / scale, exponent_bits=8, mantissa_bits=7)


def fitting_scale(largest: Float[Array, "..."], kind: jnp.dtype, digits: int = 1) -> Float[Array, "..."]:
    """Returns the largest scale with which `largest` is still a number of an 8-bit type; see `scale_index`."""
    return scale_at(scale_index(largest, kind, digits), digits)
