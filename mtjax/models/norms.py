"""Norms over the width of the residual stream."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.linear import constant
from mtjax.sharding.axes import varying_like


class LayerNorm(nnx.Module):
    """Normalises over `embed` in float32; gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.bias = constant(0.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        scaled = _layer_norm(self.epsilon, x, varying_like(self.scale[...], x))
        return (scaled + self.bias[...]).astype(self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(epsilon: float, x: Array, scale: Array) -> Array:
    normal, _ = _normal(x, *_statistics(epsilon, x))
    return normal * scale


def _layer_norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return _layer_norm(epsilon, x, scale), (x, scale)


def _layer_norm_backward(epsilon: float, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Autodiff's, but that XLA sums the scale's gradient while it reads x and the gradient.

    Left to itself it computes the statistics in the kernel of what that sum adds, and writes these terms in float32.
    """
    x, scale = saved
    normal, rate = _normal(x, *jax.lax.optimization_barrier(_statistics(epsilon, x)))
    own = gradient * scale
    own = own - normal * (own * normal).mean(-1, keepdims=True)
    own = own - own.mean(-1, keepdims=True)
    return (own * rate).astype(x.dtype), (gradient * normal).sum(range(x.ndim - 1))


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _statistics(epsilon: float, x: Array) -> tuple[Array, Array]:
    """Mean of each token, and variance plus epsilon."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True) + epsilon


def _normal(x: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """x normalised, and what it was multiplied with."""
    rate = jax.lax.rsqrt(variance)
    return (x.astype(jnp.float32) - mean) * rate, rate


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


class HeadNorm(nnx.Module):
    """RMS norm of each head, with one scale for all heads; gives the type of what it reads."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.scale = constant(1.0, {"head_dim": width})
        self.epsilon = epsilon

    def __call__(self, heads: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Applies to the last dimension."""
        x = heads.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...]).astype(heads.dtype)


Norm = LayerNorm | RMSNorm

NORMS: Mapping[str, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """The norm that a model's settings name."""
    return NORMS[model.norm](model.hidden_size, model.norm_epsilon, dtype)
