"""Norms over the width of the residual stream."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.linear import constant


class LayerNorm(nnx.Module):
    """Normalises over `embed` in float32; gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.bias = constant(0.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        return _normalised(self.epsilon, self.dtype, x, self.scale[...], self.bias[...])


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over `embed`, in float32 (arXiv 1910.07467); gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        return _normalised(self.epsilon, self.dtype, x, self.scale[...], None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _normalised(epsilon: float, dtype: jnp.dtype, x: Array, scale: Array, bias: Array | None) -> Array:
    """LayerNorm with a bias, RMSNorm without one."""
    wide = x.astype(jnp.float32)
    mean, inverse = _statistics(epsilon, wide, centred=bias is not None)
    normal = _normal(wide, mean, inverse) * scale
    return (normal if bias is None else normal + bias).astype(dtype)


def _statistics(epsilon: float, x: Array, *, centred: bool) -> tuple[Array | None, Array]:
    """The mean, where it is subtracted, and the factor of what is left; each with a last dimension of 1."""
    mean = x.mean(-1, keepdims=True) if centred else None
    rest = x if mean is None else x - mean
    return mean, jax.lax.rsqrt(jnp.square(rest).mean(-1, keepdims=True) + epsilon)


def _normal(x: Array, mean: Array | None, inverse: Array) -> Array:
    return (x if mean is None else x - mean) * inverse


Saved = tuple[Array, Array, Array | None, Array]


def _normalised_forward(
    epsilon: float, dtype: jnp.dtype, x: Array, scale: Array, bias: Array | None
) -> tuple[Array, Saved]:
    # A barrier, so that the backward pass has the statistics as values. XLA would compute them anew wherever they are
    # read, and can't put two sums - over a token's width, and over tokens - into one kernel: it would write out
    # what is summed over tokens, in float32.
    statistics = lax.optimization_barrier(_statistics(epsilon, x.astype(jnp.float32), centred=bias is not None))
    return _normalised(epsilon, dtype, x, scale, bias), (x, scale, *statistics)


def _normalised_backward(
    epsilon: float, dtype: jnp.dtype, saved: Saved, gradient: Array
) -> tuple[Array, Array, Array | None]:
    x, scale, mean, inverse = saved
    tokens, gradient = tuple(range(x.ndim - 1)), gradient.astype(jnp.float32)
    normal, slope = _normal(x.astype(jnp.float32), mean, inverse), gradient * scale
    rest = slope - normal * (slope * normal).mean(-1, keepdims=True)
    if mean is not None:
        rest = rest - slope.mean(-1, keepdims=True)
    bias_gradient = None if mean is None else gradient.sum(tokens)
    return (rest * inverse).astype(x.dtype), (gradient * normal).sum(tokens), bias_gradient


_normalised.defvjp(_normalised_forward, _normalised_backward)

Norm = LayerNorm | RMSNorm

NORMS: Mapping[str, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """The norm that a model's settings name."""
    return NORMS[model.norm](model.hidden_size, model.norm_epsilon, dtype)
